"""A patched model under torch.compile and on the meta device."""

import pytest
import torch

import automodel_c
from tests.patch import models

SMALL = {"num_hidden_layers": 2}  # one gated-delta layer, one of full attention


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo looks at every tensor it traces
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize(
    "documents",
    [
        [models.document(9, grids=[(4, 4)], seed=1), models.document(5, seed=2), models.document(1, seed=3)],
        [models.document(9, seed=1)],
    ],
    ids=["pack", "one"],
)
def test_compiled_equals_eager(family, documents):
    """Loss and every gradient; what is planned on the host breaks the graph, the operators stay in it."""
    model = models.build(family, **SMALL)
    automodel_c.patch_transformers(model)
    batch = models.pack(documents)
    expected = models.run(model, batch)
    torch._dynamo.reset()
    names = set()

    def backend(graph, inputs):
        names.update(str(node.target) for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    model.zero_grad(set_to_none=True)
    loss = torch.compile(model, backend=backend)(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected["loss"])
    for name, p in model.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(grad, expected[name], msg=lambda text, name=name: f"{name}: {text}")
    operators = {name.split(".")[1] for name in names if name.startswith("automodel_c.")}
    needed = {"rms_norm", "attention_forward", "swiglu", "sigmoid_gate", "linear_cross_entropy"}
    needed |= {"gated_delta_rule_forward", "causal_conv1d", "gdn_gate", "gated_rms_norm"}
    needed |= {"moe", "add_shared_expert"} if family == "qwen3_5_moe" else set()
    assert needed <= operators, needed - operators


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_meta_tensors_give_shapes(family):
    model = models.build(family, text_only=True, **SMALL).to("meta")
    automodel_c.patch_transformers(model)
    ids = torch.zeros(1, 70, dtype=torch.int64, device="meta")
    out = model(input_ids=ids, labels=ids)
    assert out.loss.shape == () and out.loss.is_meta
    out.loss.backward()
    assert all(p.grad.shape == p.shape and p.grad.is_meta for p in model.parameters())
    assert model(input_ids=ids).logits.shape == (1, 70, models.VOCAB)
