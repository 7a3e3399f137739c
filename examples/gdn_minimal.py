"""The gated delta rule over a pack, with states handed from one call to the next and gradients through them."""

import torch

import automodel_c as amc

torch.manual_seed(0)
tokens = 20  # three tokens of padding at the end
pack = amc.Pack(cu_seqlens=[0, 5, 5, 17])

# Two key heads of 16 and four value heads of 24; slices of one buffer are fine.
mixed = torch.randn(tokens, 2 * 16 + 2 * 16 + 4 * 24, requires_grad=True)
q, k, v = mixed.split([32, 32, 96], dim=1)
q, k, v = q.unflatten(1, (2, 16)), k.unflatten(1, (2, 16)), v.unflatten(1, (4, 24))
g, beta = -torch.rand(tokens, 4), torch.rand(tokens, 4)

o, state = amc.ops.gated_delta_rule(q, k, v, g, beta, pack=pack, output_final_state=True)
(o.square().sum() + state.sum()).backward()
print(f"o {tuple(o.shape)}, state {tuple(state.shape)}, gradient norm {mixed.grad.norm():.4f}")

# The third document alone gives the same bits; padding gets nothing.
alone, _ = amc.ops.gated_delta_rule(*(x[5:17] for x in (q, k, v, g, beta)))
assert torch.equal(alone, o[5:17])
assert not o[17:].any() and not mixed.grad[17:].any()

# A document in two calls: the second starts from the state that the first left.
rows = [x[5:17] for x in (q, k, v, g, beta)]
first, halfway = amc.ops.gated_delta_rule(*(x[:8] for x in rows), output_final_state=True)
second, end = amc.ops.gated_delta_rule(*(x[8:] for x in rows), initial_state=halfway, output_final_state=True)
print(f"two calls differ from one by {(torch.cat([first, second]) - o[5:17]).abs().max():.1e}")
torch.testing.assert_close(end[0], state[2])
