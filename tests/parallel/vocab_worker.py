"""What a rank does in the tests of a head whose words several ranks share."""

import contextlib
from unittest import mock

import torch
import torch.distributed as dist

import automodel_c as amc
from automodel_c.ops import _loss_rows, loss
from automodel_c.parallel.experts import expert_range
from automodel_c.parallel.vocab import Words
from tests.ranks import here


def problem(seed, rows, vocab, size, dtype, labelled=None):
    """The whole of it: hidden [rows, size], weight [vocab, size], labels [rows]. labelled: None for about two thirds
    of the rows; "none", "all", "one rank": whose labels are all words of the last rank that has any."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, size, generator=generator).to(dtype)
    weight = torch.randn(vocab, size, generator=generator).to(dtype)
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    if labelled == "one rank":
        labels[:] = vocab - 1
    elif labelled is None or labelled == "none":
        labels[torch.rand(rows, generator=generator) < (0.3 if labelled is None else 2.0)] = -100
    return hidden, weight, labels


def mine(hidden, weight, labels):
    """This rank's rows and words."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    rows = len(hidden) // ranks
    first, end = expert_range(len(weight), ranks, rank)
    own = slice(rank * rows, (rank + 1) * rows)
    return (x.to(here()) for x in (hidden[own], weight[first:end].clone(), labels[own]))


@contextlib.contextmanager
def as_on_cuda(wanted):
    """All rows through and logits kept by row, in small chunks."""
    with contextlib.ExitStack() as stack:
        if wanted:
            stack.enter_context(mock.patch.object(loss, "_by_rows", lambda hidden: True))
            for name, value in {"WIDEST": 256, "LEAST_SCRATCH": 1}.items():
                stack.enter_context(mock.patch.object(_loss_rows, name, value))
        yield


def step(draws, by_rows=False, upstream=1.0, needs=(True, True), **options):
    """[(loss, gradients that were asked for)] of problems, of this rank."""
    group, found = dist.group.WORLD, []
    with as_on_cuda(by_rows):
        for hidden, weight, labels in draws:
            vocab = len(weight)
            hidden, weight, labels = mine(hidden, weight, labels)
            leaves = [x.requires_grad_(need) for x, need in zip((hidden, weight), needs, strict=True)]
            value = amc.ops.linear_cross_entropy(*leaves, labels, tp_group=group, vocab_size=vocab, **options)
            wanted = [x for x in leaves if x.requires_grad]
            grads = torch.autograd.grad(value, wanted, torch.full_like(value, upstream)) if wanted else ()
            found.append([value.detach(), *grads])
    return found


def again(drawn):
    """Losses and gradients of a graph gone through twice, the loss without a graph, what a second derivative says, and
    how many bytes one forward and backward sent."""
    from automodel_c.parallel.exchange import wire

    vocab = len(drawn[1])
    hidden, weight, labels = mine(*drawn)
    call = lambda: amc.ops.linear_cross_entropy(  # noqa: E731
        hidden, weight, labels, tp_group=dist.group.WORLD, vocab_size=vocab
    )
    hidden.requires_grad_(), weight.requires_grad_()
    sent = wire.sent
    value = call()
    first = torch.autograd.grad(value, [hidden, weight], retain_graph=True)
    sent = wire.sent - sent
    second = torch.autograd.grad(value, [hidden, weight])
    with torch.no_grad():
        bare = call()
    grads = torch.autograd.grad(call(), [hidden], create_graph=True)
    try:
        grads[0].sum().backward()
        said = None
    except RuntimeError as error:
        said = str(error)
    return [value.detach(), *first], [bare, *second], said, sent


def refused(change):
    """What this rank is told where rank 1 passes something else."""
    odd = dist.get_rank() == 1
    hidden, weight, labels = mine(*problem(0, 8, 12, 4, torch.float32))
    arguments = {"hidden": hidden, "weight": weight, "labels": labels}
    arguments |= {"tp_group": dist.new_group(), "vocab_size": 12}
    if odd or change.get("everywhere"):
        arguments |= {key: value for key, value in change.items() if key != "everywhere"}
    try:
        amc.ops.linear_cross_entropy(**arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def words_of(vocab):
    """(first, held) of this rank."""
    words = Words(vocab, 1, dist.group.WORLD, "")
    return words.first, words.held
