"""Models whose plans are searched, with a batch of each, and what runs a plan on ranks that are threads."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from dtensor import distribute_model, init_device_mesh
from dtensor.prices.links import Link
from dtensor.testing import ModelArgs, Transformer, run_threads

SLOW, FAST = Link(alpha=5e-5, bandwidth=1e8, start=2e-5), Link(alpha=1e-7, bandwidth=1e12, start=1e-7)


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, y):
        out = self.inner(x)
        return F.mse_loss(out, y) if y.is_floating_point() else F.cross_entropy(out.flatten(0, 1), y.flatten())


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=1)
        self.b = nn.Conv2d(16, 32, 3, padding=1, stride=2)
        self.head = nn.Linear(32 * 16, 8)

    def forward(self, x):
        return self.head(F.relu(self.b(F.relu(self.a(x)))).flatten(1))


class Wide(nn.Module):
    """A wide perceptron between the two ends of one large table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(512, 16)
        self.up, self.down = nn.Linear(16, 256), nn.Linear(256, 16)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.table(x)))) @ self.table.weight.t()


def tokens(vocab, batch=4, seq=16):
    drawn = torch.randint(vocab, (batch, seq + 1), generator=torch.Generator().manual_seed(0))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def perceptron():
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), (torch.randn(8, 16), torch.randn(8, 16))


def decoder(layers=2):
    inner = Transformer(ModelArgs(layers, 64, 16, 32, 4, dropout_p=0.0, weight_tying=False))
    return inner, tokens(64)


def images():
    return Images(), (torch.randn(4, 3, 8, 8), torch.randn(4, 8))


def wide():
    return Wide(), tokens(512)


MODELS = {"perceptron": perceptron, "decoder": decoder, "images": images, "wide": wide}


def made(name):
    """A model with its loss, in float64, and its batch."""
    torch.manual_seed(0)
    inner, batch = MODELS[name]()
    return WithLoss(inner).double(), tuple([x.double() if x.is_floating_point() else x for x in batch])


def alone(model, batch):
    """Loss and gradients on one device."""
    whole = copy.deepcopy(model)
    loss = whole(*batch)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in whole.named_parameters()}


def trains_as_one_device(model, batch, plan):
    """Raises AssertionError if loss or gradients differ."""
    loss, gradients = on_ranks(model, batch, plan)
    expected, grads = alone(model, batch)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients, grads)


def on_ranks(model, batch, plan):
    """Loss and gradients of the first rank, sharded by a plan."""

    def step(rank):
        mesh = init_device_mesh("cpu", tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
        mine = distribute_model(copy.deepcopy(model), mesh, plan, outputs={})
        loss = mine(*plan.part(batch, mesh, model))
        loss.backward()
        return loss.detach(), {name: p.grad.full_tensor() for name, p in mine.named_parameters()}

    ranks = 1
    for n in plan.mesh.values():
        ranks *= n
    return run_threads(step, ranks)[0]
