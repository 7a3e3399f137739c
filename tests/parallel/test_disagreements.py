"""Arguments that are good on every rank but not the same: every rank raises, soon, and names who differs.

Nothing ends a process: ranks that disagree about the size of a message must not get as far as gloo's own check.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from automodel_c import parallel
from automodel_c.parallel import ContextParallel, Prices, RankFailure, faults, shard_vision
from tests.parallel import context_worker, gdn_worker
from tests.parallel.test_frame_shard import GRID, ON, Tower, pixels
from tests.ranks import here

SOON_S = 20.0  # on idle cores it takes one


class Case:
    """One call in a new group: what all ranks pass, and how the odd one differs. ``words`` are in every message."""

    def __init__(self, call, *words):
        self.call, self.words = call, words


def ids(tokens, inside=False):
    """Documents that go over every edge, or over none."""
    ranks = dist.get_world_size()
    return [1 + i // (tokens // ranks) for i in range(tokens)] if inside else [1] * (tokens - 3) + [2] * 3


def attend(change=None, plan=None, **kinds):
    def call(cp, odd):
        tokens = 12 * cp.ranks
        made = cp.plan(doc_ids=ids(tokens), scheme="balanced")
        other = cp.plan(**{"doc_ids": ids(tokens), "scheme": "balanced"} | kinds) if kinds else made
        q, k, v = context_worker.inputs(tokens)[:3]
        q, k, v = (cp.shard(x.to(here()), made).requires_grad_() for x in (q, k, v))
        if odd and change:
            q, k, v = (change(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
        out = parallel.attention(q, k, v, (plan(cp) if plan else other) if odd else made)
        if out.requires_grad:
            out.sum().backward()
        cp.gather(out.detach(), made)

    return call


def no_exchange(then):
    """A pack whose operators send nothing: its peers learn later that the odd rank raised, or has another plan."""

    def call(cp, odd):
        tokens = 12 * cp.ranks
        plan = cp.plan(doc_ids=ids(tokens, inside=True))
        q, k, v = (cp.shard(x.to(here()), plan) for x in context_worker.inputs(tokens)[:3])
        if odd and then == "plan":
            plan = other_documents(cp)
        out = parallel.attention(q, k[1:] if odd and then == "argument" else k, v, plan)
        cp.gather(out, plan)

    return call


def delta_rule(change):
    def call(cp, odd):
        tokens = 12 * cp.ranks
        plan = cp.plan(doc_ids=ids(tokens))
        tensors = [cp.shard(x.to(here()), plan) for x in gdn_worker.inputs(tokens)[:5]]
        parallel.gated_delta_rule(*(change(tensors) if odd else tensors), plan)

    return call


def convolve(change):
    def call(cp, odd):
        plan = cp.plan(doc_ids=ids(12 * cp.ranks))
        x, weight = torch.randn(plan.local, 24, device=here()), torch.randn(24, 4, device=here())
        parallel.causal_conv1d(*(change(x, weight) if odd else (x, weight)), plan)

    return call


def gather(change):
    def call(cp, odd):
        plan = cp.plan(tokens=12 * cp.ranks)
        x = torch.randn(plan.local, 8, device=here())
        cp.gather(change(x) if odd else x, plan)

    return call


def see(change=None, media=None, raises=None, **config):
    def call(cp, odd):
        tower = Tower("tuple")

        def visual(pixel_values, grid_thw):
            if odd and raises:
                raise raises
            result = tower(pixel_values, grid_thw)
            return change(result) if odd and change else result

        given = media(pixels(), torch.tensor(GRID)) if odd and media else (pixels(), torch.tensor(GRID))
        visual.spatial_merge_size = 2
        tokens = shard_vision(visual, *given, cp.group, {**ON, **(config if odd else {})})[0]
        if tokens.requires_grad:
            tokens.sum().backward()
        cp.gather(torch.zeros(2, 1), cp.plan(tokens=2 * cp.ranks))

    return call


def without(name, what):
    """The tensor of that name changed, the others as they are."""
    return lambda tensors: [what(x) if i == name else x for i, x in enumerate(tensors)]


def only_queries(name, x):
    return x[:, :2] if name == "q" else x


def other_documents(cp, inside=True):
    return cp.plan(doc_ids=[*ids(12 * cp.ranks, inside)[:-1], 0])


DEAR = Prices({"float32": 1.0}, 1.0, 1.0)
CASES = {
    "attention: dtype": Case(attend(lambda _, x: x.bfloat16()), "keys and values", "torch.bfloat16", "torch.float32"),
    "attention: fewer query heads": Case(attend(only_queries), "2 heads over 2 of dim 16", "4 heads over 2 of dim 16"),
    "attention: dim": Case(attend(lambda _, x: torch.cat([x, x], 2)), "rows [2, 2, 32]", "rows [2, 2, 16]"),
    "attention: meta": Case(attend(lambda _, x: x.detach().to("meta")), "NotImplementedError: exchange: x is on meta"),
    "attention: no gradient": Case(attend(lambda _, x: x.detach()), "gradients of outputs", "gathered rows"),
    "plan: none": Case(attend(plan=lambda cp: None), "TypeError: parallel.attention: plan must come from", "NoneType"),
    "plan: documents": Case(attend(plan=lambda cp: other_documents(cp, inside=False)), "plan of 2 documents in"),
    "plan: layout": Case(attend(layout="round_robin", scheme="home"), "round_robin, home", "contiguous, balanced"),
    "plan: prices": Case(attend(prices=DEAR), "plan of 2 documents in"),
    "plan: no exchange": Case(attend(plan=other_documents), "plan of 2 documents in"),
    "plan: no exchange anywhere": Case(no_exchange("plan"), "contiguous, auto ["),
    "argument, no exchange": Case(no_exchange("argument"), "ValueError: parallel.attention: k has 11 rows, a rank hol"),
    "delta rule: beta": Case(delta_rule(without(4, lambda x: x[:, :1])), "ValueError: gated_delta_rule: "),
    "delta rule: dims": Case(delta_rule(lambda t: (t[0][..., :8], t[1][..., :8], *t[2:])), "(8 x 24)", "(16 x 24)"),
    "delta rule: heads": Case(
        delta_rule(lambda t: (*(x[:, :1] for x in t[:2]), *(x[:, :2] for x in t[2:]))), "rows [2, 16]", "rows [4, 16]"
    ),
    "delta rule: no tensor": Case(delta_rule(without(2, lambda x: None)), "v must be a torch tensor, not NoneType"),
    "convolution: channels": Case(convolve(lambda x, w: (x[:, :16].contiguous(), w[:16])), "rows [16]", "rows [24]"),
    "convolution: width": Case(convolve(lambda x, w: (x, w[:, :3].contiguous())), "width 3", "width 4"),
    "convolution: dtype": Case(convolve(lambda x, w: (x.bfloat16(), w.bfloat16())), "torch.bfloat16", "torch.float32"),
    "gather: width": Case(gather(lambda x: x[:, :5]), "rows [5] of torch.float32", "rows [8] of torch.float32"),
    "gather: axes": Case(gather(lambda x: x[:, 0]), "rows [] of", "rows [8] of"),
    "gather: dtype": Case(gather(lambda x: x.double()), "torch.float64", "torch.float32"),
    "gather: meta": Case(gather(lambda x: x.to("meta")), "NotImplementedError: exchange: x is on meta"),
    "gather: plan": Case(gather(lambda x: None), "TypeError: gather: x must be a torch tensor, not NoneType"),
    "tower: raises": Case(see(raises=KeyError("weights")), "KeyError: 'weights'"),
    "tower: kind": Case(see(lambda r: r[0]), "hold different results of their towers"),
    "tower: width": Case(see(lambda r: (r[0][:, :4], r[1])), "hold different results of their towers"),
    "tower: dtype": Case(see(lambda r: (r[0].double(), r[1])), "hold different results of their towers"),
    "tower: no result": Case(see(lambda r: None), "TypeError: shard_vision: the tower returned NoneType"),
    "tower: no gradient": Case(
        see(lambda r: (r[0].detach(), [x.detach() for x in r[1]])), "gradients of 13 tokens of shard_vision, 18 wide",
        "plan of 1 documents",
    ),
    "frames: key": Case(see(min_frame=1), "ValueError: ", "min_frame"),
    "frames: value": Case(see(min_tokens=-1), "ValueError: frame_sharding.min_tokens is -1"),
    "frames: alpha": Case(see(cost_alpha=7), "hold different configurations"),
    "frames: off": Case(see(enabled=False), "shard_vision, not enabled", "shard_vision, enabled"),
    "frames: kind": Case(see(media=lambda p, g: (p, g.tolist())), "AttributeError"),
}  # fmt: skip


def outcomes(names, culprit, after=lambda: None):
    """What this rank raised in each case, in a group of its own: (message, rank that it names, seconds). `after` runs
    after each."""
    found = []
    for name in names:
        cp = ContextParallel(dist.new_group(list(range(dist.get_world_size()))))
        began = time.monotonic()
        try:
            CASES[name].call(cp, dist.get_rank() == culprit)
            found.append(("nothing", None, 0.0))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            found.append((text, getattr(error, "rank", None), time.monotonic() - began))
        after()
    return found


@pytest.mark.parametrize(("world", "culprit"), [(2, 1), (3, 0)])
def test_a_rank_that_differs_is_named_by_every_rank(rank_pools, world, culprit):
    found = rank_pools(world).run(outcomes, list(CASES), culprit, timeout=240)
    rank_pools(world).close()
    wrong = [
        (name, rank, *answer)
        for name, answers in zip(CASES, zip(*found, strict=True), strict=True)
        for rank, answer in enumerate(answers)
        if not good(CASES[name].words, rank, culprit, *answer)
    ]
    assert not wrong, "\n".join(str(each) for each in wrong)


def good(words, rank, culprit, text, named, took):
    if not all(each in text for each in words) or took > SOON_S:
        return False
    if text.startswith(RankFailure.__name__):
        return named == culprit and f"rank {culprit} failed: " in text
    return rank == culprit or f"most ranks what rank {1 - min(culprit, 1)} does" in text


def slowly(steps):
    """Steps with and without exchanges, where now one rank, now another comes long after the rest."""
    cp, tokens = ContextParallel(dist.new_group(list(range(dist.get_world_size())))), 12 * dist.get_world_size()
    for step in range(steps):
        plans = [cp.plan(doc_ids=ids(tokens, inside)) for inside in (True, step % 3 == 0, True)]
        for plan in plans:
            q, k, v = (cp.shard(x, plan).requires_grad_() for x in context_worker.inputs(tokens)[:3])
            out = parallel.attention(q, k, v, plan)
            time.sleep(0.7 * ((step + plan.rank) % cp.ranks == 0))
            out.sum().backward()
        whole = cp.gather(torch.full((plan.local,), float(step)), plan)
    return whole.tolist() == [steps - 1.0] * tokens


def test_slow_ranks_are_no_disagreement(rank_pools):
    assert rank_pools(3).run(slowly, 4) == [True] * 3


def one_half(culprit):
    """What the ranks of a mesh of dp 2 x cp 2 raised when one passes other rows, and what the other pair gathered."""
    cp = ContextParallel(context_worker.groups("cp"))
    plan = cp.plan(tokens=8)
    dtype = torch.float64 if dist.get_rank() == culprit else torch.float32
    found = []
    for _ in range(2):
        try:
            found.append(cp.gather(torch.ones(plan.local, dtype=dtype), plan).sum().item())
        except RankFailure as error:
            found.append(str(error))
            break
        time.sleep(1.0)
    return found


def test_a_failure_stays_in_its_group(rank_pools):
    found = rank_pools(4).run(one_half, 2)
    rank_pools(4).close()
    assert found[:2] == [[8.0, 8.0]] * 2
    for (text,) in found[2:]:
        assert text.startswith("rank 2 failed: ") or text.startswith("rank 3 failed: ")
        assert "rank 2 has gathered rows" in text or "rank 2 gathered rows" in text


def in_another_collective(culprit):
    """The culprit's plan needs no exchange: it waits for its peers in another group, and they for it in an exchange."""
    everyone = list(range(dist.get_world_size()))
    cp, other = ContextParallel(dist.new_group(everyone)), dist.new_group(everyone)
    tokens = 12 * cp.ranks
    plan = cp.plan(doc_ids=ids(tokens, inside=dist.get_rank() == culprit))
    q, k, v = (cp.shard(x, plan) for x in context_worker.inputs(tokens)[:3])
    try:
        with faults.guard():
            out = parallel.attention(q, k, v, plan)
            dist.all_reduce(out, group=other)
    except RankFailure as error:
        return error.rank, error.message


@pytest.mark.parametrize(("world", "culprit"), [(2, 1), (3, 0)])
def test_under_a_guard_a_rank_that_went_on_is_told(rank_pools, world, culprit):
    found = rank_pools(world).run(in_another_collective, culprit)
    rank_pools(world).close()
    for rank, message in found:
        assert rank == culprit and f"rank {culprit} has a plan of {world} documents" in message


def test_plain_scripts_end_as_they_should():
    """Two groups of two processes: one catches the failure and ends well, the other ends with a traceback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = Path(__file__).with_name("script_with_a_disagreement.py")
    root = Path(__file__).parents[2]
    common = {**os.environ, "PYTHONPATH": str(root), "WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)], env={**common, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True,
            cwd=root,
        )
        for rank in range(4)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=100)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0, 1, 1], said
    for rank, text in enumerate(said):
        assert ("caught" if rank < 2 else "RankFailure: ") in text
        assert f"rank {1 + rank // 2 * 2} failed: ValueError: ranks disagree" in text, text
