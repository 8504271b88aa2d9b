"""`%%tracefuse --train-all` in a real kernel: every gradient is in the trace, and the cell notices nothing."""

from __future__ import annotations

from notebook_kernel import QUICK, Kernel

NET = """
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).requires_grad_(False)
scale = torch.nn.Parameter(torch.ones(2))
"""
CELL = """
linear = torch.nn.functional.linear
y = linear(linear(x.detach(), net[0].weight, net[0].bias), net[1].weight)
(y * scale).sum().backward()
"""


def test_frozen_parameters_are_trained_in_the_trace_only(kernel: Kernel) -> None:
    kernel.run(NET)
    reply = kernel.run(f"{QUICK} --train-all --freeze '*' --freeze '!*.weight' -o c\n{CELL}")
    assert reply.status == "ok", reply.error
    trained = "sorted(i.source for i in c.trace.inputs if i.trainable)"
    assert kernel.value(trained) == "['0.bias', '0.weight', '1.weight', 'scale']"
    assert kernel.value("sorted(c.thawed)") == "['0.bias', '0.weight', '1.weight']"
    assert kernel.value("[p.requires_grad or p.grad for p in net.parameters()], scale.grad is None") == (
        "([None, None, None, None], False)"
    )


def test_without_the_flag_they_are_not(kernel: Kernel) -> None:
    kernel.run(NET)
    reply = kernel.run(f"{QUICK} -o c\n{CELL}")
    assert reply.status == "ok", reply.error
    assert kernel.value("[i.source for i in c.trace.inputs if i.trainable]") == "['scale']"
