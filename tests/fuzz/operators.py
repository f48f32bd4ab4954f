"""What a step may be: name -> builder, which takes choices and gives text.

A text is an expression, whose value gets a new name; an assignment to several names; or, after "!", a statement that
writes. `c.float()` and its kind name values; `c.input(shape)` makes a new input. What depends on the order of equal
values or on their last bit is only built for values that are well apart (`c.distinct`).
"""

from collections.abc import Callable

from .building import Choices

BUILDERS: dict[str, Callable[[Choices], str]] = {}
"""Name of a step -> its builder."""

GROUPS: dict[str, list[str]] = {}
"""Kind of step -> the names of its steps; kinds are drawn equally often."""


def step(kind: str, name: str = ""):
    """Decorator: a builder of this kind, under its function's name."""

    def register(builder):
        known = name or builder.__name__.strip("_")
        BUILDERS[known] = builder
        GROUPS.setdefault(kind, []).append(known)
        return builder

    return register


def new_names(c: Choices, n: int) -> str:
    """Names for `n` new values."""
    count = len(c.building.values)
    return ", ".join(f"v{count}_{k}" for k in range(n)) + ("," if n == 1 else "")


# Inputs and redistributions


@step("input")
def _input(c):
    c.input([c.size() for _ in range(c.one_of(2, 3, 1, 3, 2, 0))])
    return ""


@step("move")
def move(c):
    x = c.float()
    return f"move({x}, {c.where(x)})"


@step("move", "move integers")
def move_integers(c):
    x = c.value(lambda x: not x.is_floating_point())
    return f"move({x}, {c.where(x)})"


@step("border")
def through_whole(c):
    c.feature_of_twice("second derivatives through borders")
    return f"through_whole({c.float()})"


@step("border")
def through_local(c):
    c.feature_of_twice("second derivatives through borders")
    return f"through_local({c.float()})"


# Pointwise

UNARY = (
    *(
        "torch.sin({})",
        "torch.tanh({})",
        "torch.sigmoid({})",
        "F.relu({})",
        "F.gelu({})",
        "F.silu({})",
        "-{}",
        "{}.abs()",
    ),
    *("{} * 2", "{} + 1", "1 - {}", "{}.square()", "{}.pow(3)", "torch.exp(-{}.abs())", "torch.log1p({}.abs())"),
    *("({}.abs() + 1).sqrt()", "{}.clamp(-1, 1)", "F.softplus({})", "F.leaky_relu({}, 0.1)", "{} / 3", "{}.clone()"),
    *("F.hardtanh({})", "torch.erf({})", "{}.clamp(min=0.5)", "F.elu({})", "{}.contiguous()", "{}.nan_to_num()"),
)
BINARY = (
    *("{} + {}", "{} * {}", "{} - {}", "{} / ({}.square() + 1)", "torch.maximum({}, {})", "torch.minimum({}, {})"),
    *("torch.add({}, {}, alpha=2)", "torch.atan2({}, {}.abs() + 1)", "torch.hypot({}, {}.abs() + 1)"),
    *("torch.lerp({}, {}, 0.25)", "F.mse_loss({}, {}, reduction='none')", "torch.logaddexp({}, {})"),
)


def broadcast(c: Choices, x: str) -> str:
    """A value that broadcasts with `x` to the shape of `x`."""
    shape = c.shape(x)
    k = c.number(4)
    if k == 0 or not shape:
        return c.of_shape(shape)
    if k == 1:
        return c.of_shape(shape[1:])
    dim = c.dim(x)
    if k == 2:
        return c.of_shape([1 if d == dim else n for d, n in enumerate(shape)])
    return c.of_shape(shape[-1:])


@step("pointwise")
def unary(c):
    return c.one_of(*UNARY).format(c.float())


@step("pointwise")
def binary(c):
    x = c.float()
    return c.one_of(*BINARY).format(x, broadcast(c, x))


@step("pointwise")
def ternary(c):
    x = c.float()
    y, z = broadcast(c, x), broadcast(c, x)
    return c.one_of("torch.addcmul({}, {}, {}, value=0.5)", "{} * {} + {}", "torch.lerp({}, {}, {})").format(x, y, z)


@step("pointwise")
def where(c):
    x = c.distinct(c.float())
    return f"torch.where({x} > 0.1, {x}, {broadcast(c, x)})"


@step("pointwise")
def masked_fill(c):
    x = c.float()
    mask = c.distinct(broadcast(c, x))
    return f"{x}.masked_fill({mask} > 0.1, {c.one_of(0.0, -1.5)})"


@step("pointwise")
def dtypes(c):
    return f"{c.float()}.{c.one_of('float()', 'double()', 'to(torch.float64)', 'type_as({})')}".format(c.float())


@step("pointwise")
def glu(c):
    x = c.float(1)
    return f"F.glu({x}, {c.dim(x)})"


# Products


@step("product")
def matmul(c):
    x = c.float(1)
    *_, n = c.shape(x)
    return f"{x} @ {c.of_shape(c.one_of((n, c.size()), (n, n), (n,)))}"


@step("product")
def rmatmul(c):
    x = c.float(2, 3)
    return f"{c.of_shape((c.size(), c.shape(x)[-2]))} @ {x}"


@step("product")
def linear(c):
    x = c.float(1)
    m = c.size()
    bias = f", {c.of_shape((m,))}" if c.switch() else ""
    return f"F.linear({x}, {c.of_shape((m, c.shape(x)[-1]))}{bias})"


@step("product")
def bmm(c):
    x = c.float(3, 3)
    b, _, n = c.shape(x)
    return f"torch.bmm({x}, {c.of_shape((b, n, c.size()))})"


@step("product")
def gram(c):
    x = c.float(2)
    return c.one_of(f"{x} @ {x}.mT", f"{x}.mT @ {x}", f"torch.einsum('...ij,...kj->...ik', {x}, {x}.sin())")


@step("product")
def einsum(c):
    x = c.float(2, 3)
    *_, m, n = c.shape(x)
    k = c.size()
    equation, other = c.one_of(("...mn,nk->...mk", (n, k)), ("...mn,mk->...kn", (m, k)), ("...mn,n->...m", (n,)))
    return f"torch.einsum('{equation}', {x}, {c.of_shape(other)})"


@step("product")
def addmm(c):
    x = c.float(2, 2)
    k = c.size()
    return f"torch.addmm({c.of_shape((k,))}, {x}, {c.of_shape((c.shape(x)[1], k))})"


@step("product")
def outer(c):
    x = c.float(1, 1)
    return f"torch.outer({x}, {c.of_shape((c.size(),))})"


@step("product")
def attention(c):
    x = c.float(3, 4)
    *batch, _, e = c.shape(x)
    other = c.of_shape((*batch, c.size(), e)) if c.switch() else x
    causal = ", is_causal=True" if other == x and c.switch() else ""
    if 0 in (*c.shape(x), *c.shape(other)):
        c.feature("attention over empty dimensions")
    return f"F.scaled_dot_product_attention({x}, {other}, {other}.sin(){causal})"


@step("product")
def bilinear(c):
    x = c.float(2, 2)
    n, f = c.shape(x)
    return f"F.bilinear({x}, {c.of_shape((n, c.size()))}, {c.input((2, f, c.size()))})"


@step("convolution")
def conv(c):
    x = c.float(2, 3)
    channels = c.shape(x)[-2]
    k = c.one_of(1, 2, 3)
    w = c.input((c.size(), channels, k))
    return f"F.conv1d({x}, {w}, padding={c.number(2)}, stride={1 + c.number(2)})"


@step("convolution")
def conv2d(c):
    x = c.float(3, 4)
    w = c.input((c.size(), c.shape(x)[-3], c.one_of(1, 2, 3), c.one_of(1, 2)))
    return f"F.conv2d({x}, {w}, padding={c.number(2)})"


@step("convolution")
def pooling(c):
    x = c.float(2, 4)
    return c.one_of(f"F.avg_pool1d({x}, 2)", f"F.max_pool1d({c.distinct(x)}, 2)", f"F.avg_pool2d({x}, 2)")


# Reductions


@step("reduction")
def reduce(c):
    x = c.float()
    keep = ", keepdim=True" if c.switch() else ""
    name = c.one_of("sum", "mean", "sum", "amax", "prod", "logsumexp", "var", "std", "amin", "nansum", "norm")
    if name in ("amax", "amin"):
        c.distinct(x)
    if not c.shape(x) or (c.number(4) == 3 and name not in ("prod", "logsumexp")):
        return f"{x}.{name}()"
    dims = c.dim(x) if name == "prod" or c.switch() else tuple(sorted({c.dim(x), c.dim(x)}))
    if name == "norm":
        return f"torch.linalg.vector_norm({x}, {c.one_of(2, 1, 3)}, dim={dims}{keep})"
    return f"{x}.{name}(dim={dims}{keep})"


@step("reduction")
def var_mean(c):
    x = c.float(1)
    keep = ", keepdim=True" if c.switch() else ""
    return f"{new_names(c, 2)} = torch.var_mean({x}, dim={c.dim(x)}, correction={c.number(2)}{keep})"


@step("reduction")
def extreme(c):
    x = c.distinct(c.float(1, filled=True))
    return f"{new_names(c, 2)} = torch.{c.one_of('max', 'min', 'median')}({x}, dim={c.dim(x)})"


@step("reduction")
def count(c):
    x = c.distinct(c.float(1))
    return f"{c.one_of('({} > 0.1).sum(dim={})', '({} > 0.1).any(dim={})', '({} < 5).all(dim={})')}".format(x, c.dim(x))


# Norms


def tail(c: Choices, x: str) -> tuple[int, ...]:
    """The last one or two lengths of `x`."""
    shape = c.shape(x)
    return shape[-1 - c.number(min(2, len(shape))) :]


@step("norm")
def layer_norm(c):
    x = c.float(1)
    shape = tail(c, x)
    weights = c.one_of(0, 2, 1)
    given = "".join(f", {c.of_shape(shape)}" for _ in range(weights))
    return f"F.layer_norm({x}, {shape}{given})"


@step("norm")
def rms_norm(c):
    x = c.float(1)
    shape = tail(c, x)
    given = f", {c.of_shape(shape)}" if c.switch() else ""
    return f"F.rms_norm({x}, {shape}{given}, eps=1e-3)"


@step("norm")
def group_norm(c):
    x = c.float(2)
    channels = c.shape(x)[1]
    c.need(channels)
    groups = c.one_of(*[g for g in range(1, channels + 1) if channels % g == 0])
    given = f", {c.of_shape((channels,))}, {c.of_shape((channels,))}" if c.switch() else ""
    return f"F.group_norm({x}, {groups}{given})"


@step("norm")
def batch_norm(c):
    x = c.float(2)
    given = f", {c.of_shape(c.shape(x)[1:2])}, {c.of_shape(c.shape(x)[1:2])}" if c.switch() else ", None, None"
    return f"F.batch_norm({x}, None, None{given}, training=True)"


@step("norm")
def normalize(c):
    x = c.float(1)
    return f"F.normalize({x}, dim={c.dim(x)})"


@step("norm")
def distance(c):
    x = c.float(1)
    y = c.of_shape(c.shape(x))
    return c.one_of(f"F.cosine_similarity({x}, {y}, dim={c.dim(x)})", f"F.pairwise_distance({x}, {y})")


# Softmax and losses


@step("softmax")
def softmax(c):
    x = c.float(1)
    return f"F.{c.one_of('softmax', 'log_softmax', 'softmin')}({x}, dim={c.dim(x)})"


@step("softmax")
def cross_entropy(c):
    x = c.float(2, 4, filled=True)
    batch, classes, *rest = c.shape(x)
    target = c.input((batch, *rest), high=classes)
    extra = c.one_of("", ", reduction='sum'", ", label_smoothing=0.1", ", ignore_index=0", ", reduction='none'")
    return f"F.cross_entropy({x}, {target}{extra})"


@step("softmax")
def nll(c):
    x = c.float(2, 3, filled=True)
    batch, classes, *rest = c.shape(x)
    return f"F.nll_loss(F.log_softmax({x}, 1), {c.input((batch, *rest), high=classes)})"


@step("softmax")
def loss(c):
    c.feature_of_twice("second derivatives of losses")
    x = c.float()
    y = c.of_shape(c.shape(x))
    return c.one_of(
        f"F.mse_loss({x}, {y})",
        f"F.smooth_l1_loss({x}, {y})",
        f"F.binary_cross_entropy_with_logits({x}, {y}.sigmoid())",
        f"F.kl_div(F.log_softmax({x}, -1), F.softmax({y}, -1), reduction='sum')",
    )


# Along a dimension


@step("scan")
def cumulate(c):
    x = c.float(1)
    return f"{x}.{c.one_of('cumsum', 'cumprod', 'logcumsumexp')}({c.dim(x)})"


@step("scan")
def cummax(c):
    x = c.distinct(c.float(1, filled=True))
    return f"{new_names(c, 2)} = torch.cummax({x}, {c.dim(x)})"


@step("order")
def sort(c):
    x = c.distinct(c.float(1))
    return f"{new_names(c, 2)} = torch.sort({x}, dim={c.dim(x)}, descending={c.switch()})"


@step("order")
def topk(c):
    c.feature_of_twice("second derivatives of topk")
    x = c.distinct(c.float(1, filled=True))
    dim = c.dim(x)
    return f"{new_names(c, 2)} = torch.topk({x}, {1 + c.number(c.shape(x)[dim])}, dim={dim})"


@step("order")
def arg(c):
    x = c.distinct(c.float(1, filled=True))
    return f"{x}.{c.one_of('argmax', 'argmin', 'argsort')}(dim={c.dim(x)})"


# Indexing


@step("indexing")
def embedding(c):
    c.feature_of_twice("second derivatives of embeddings")
    w = c.float(2, 2, filled=True)
    shape = c.one_of((c.size(),), (c.size(), c.size()))
    return f"F.embedding({c.input(shape, high=c.shape(w)[0])}, {w})"


@step("indexing")
def one_hot(c):
    c.feature("one-hot")
    i = c.value(lambda x: str(x.dtype) == "torch.int64" and x.numel() > 0)
    return f"F.one_hot({i}, {int(c.tensor(i).max()) + 1}).double()"


@step("indexing")
def index_select(c):
    x = c.float(1, filled=True)
    dim = c.dim(x)
    return f"torch.index_select({x}, {dim}, {c.input((c.size(),), high=c.shape(x)[dim])})"


@step("indexing")
def gather(c):
    x = c.float(1, filled=True)
    dim = c.dim(x)
    shape = tuple(c.size() if d == dim else n for d, n in enumerate(c.shape(x)))
    return f"torch.gather({x}, {dim}, {c.input(shape, high=c.shape(x)[dim])})"


@step("indexing")
def take_along(c):
    x = c.distinct(c.float(1, filled=True))
    dim = c.dim(x)
    return f"torch.take_along_dim({x}, {x}.argsort({dim}), {dim})"


@step("indexing")
def index(c):
    x = c.float(1, filled=True)
    return f"{x}[{c.input((c.size(),), high=c.shape(x)[0])}]"


@step("indexing")
def index_two(c):
    x = c.float(2, filled=True)
    n = c.size()
    m, k, *_ = c.shape(x)
    return f"{x}[{c.input((n,), high=m)}, {c.input((n,), high=k)}]"


@step("indexing")
def scatter_add(c):
    x = c.float(1, filled=True)
    dim = c.dim(x)
    shape = tuple(c.size() if d == dim else n for d, n in enumerate(c.shape(x)))
    index = c.input(shape, high=c.shape(x)[dim])
    return f"torch.scatter_add({x}, {dim}, {index}, {c.of_shape(shape)})"


@step("indexing")
def scatter(c):
    x = c.distinct(c.float(1, filled=True))
    dim = c.dim(x)
    return f"torch.scatter({x}, {dim}, {x}.argsort({dim}), {c.of_shape(c.shape(x))})"


@step("indexing")
def index_add(c):
    x = c.float(1, filled=True)
    dim, n = c.dim(x), c.size()
    source = c.of_shape([n if d == dim else m for d, m in enumerate(c.shape(x))])
    return f"torch.index_add({x}, {dim}, {c.input((n,), high=c.shape(x)[dim])}, {source})"


@step("indexing")
def index_put(c):
    x = c.float(1, filled=True)
    n = c.size()
    values = c.of_shape((n, *c.shape(x)[1:]))
    return f"torch.index_put({x}, ({c.input((n,), high=c.shape(x)[0])},), {values}, accumulate=True)"


# Parts and wholes


@step("parts")
def cat(c):
    x = c.float(1)
    dim = c.dim(x)
    other = [c.size() if d == dim else n for d, n in enumerate(c.shape(x))]
    return f"torch.cat([{x}, {c.one_of(x, c.of_shape(other))}], {dim})"


@step("parts")
def stack(c):
    x = c.float(0, 3)
    return f"torch.stack([{x}, {c.of_shape(c.shape(x))}], {c.number(len(c.shape(x)) + 1)})"


@step("parts")
def split(c):
    x = c.float(1, filled=True)
    dim = c.dim(x)
    n = c.shape(x)[dim]
    size = 1 + c.number(n)
    count = -(-n // size)
    c.need(count <= 4)
    return f"{new_names(c, count)} = {x}.split({size}, {dim})"


@step("parts")
def chunk(c):
    x = c.float(1, filled=True)
    dim = c.dim(x)
    n = c.one_of(2, 3)
    return f"{new_names(c, len(c.tensor(x).chunk(n, dim)))} = {x}.chunk({n}, {dim})"


@step("parts")
def unbind(c):
    x = c.float(1, filled=True)
    dim = c.dim(x)
    c.need(c.shape(x)[dim] <= 4)
    return f"{new_names(c, c.shape(x)[dim])} = {x}.unbind({dim})"


@step("parts")
def narrow(c):
    x = c.float(1, filled=True)
    dim = c.dim(x)
    start = c.number(c.shape(x)[dim])
    return f"{x}.narrow({dim}, {start}, {1 + c.number(c.shape(x)[dim] - start)})"


@step("parts")
def slices(c):
    x = c.float(1)
    dim = c.dim(x)
    return f"{x}[{':, ' * dim}{c.one_of('1:', ':-1', '::2', '1::2', '-2:', '0:3', 'None', '0')}]"


@step("parts")
def select(c):
    x = c.float(1, filled=True)
    dim = c.dim(x)
    return f"{x}.select({dim}, {c.number(c.shape(x)[dim])})"


@step("parts")
def diagonal(c):
    x = c.float(2)
    dims = sorted({c.dim(x), c.dim(x)})
    c.need(len(dims) == 2)
    return f"torch.diagonal({x}, {c.number(3) - 1}, {dims[0]}, {dims[1]})"


@step("parts")
def unfold(c):
    x = c.float(1, 3, filled=True)
    dim = c.dim(x)
    return f"{x}.unfold({dim}, {1 + c.number(c.shape(x)[dim])}, {1 + c.number(2)})"


@step("parts")
def pad(c):
    x = c.float(1)
    sizes = tuple(c.number(3) for _ in range(2 * (1 + c.number(len(c.shape(x))))))
    return f"F.pad({x}, {sizes}{c.one_of('', ', value=2.0')})"


@step("parts")
def roll(c):
    x = c.float(1)
    return f"torch.roll({x}, {c.number(5) - 2}, {c.dim(x)})"


@step("parts")
def flip(c):
    x = c.float(1)
    return f"torch.flip({x}, [{c.dim(x)}])"


@step("parts")
def triangle(c):
    return f"torch.{c.one_of('tril', 'triu')}({c.float(2)}, {c.number(3) - 1})"


@step("parts")
def repeat(c):
    x = c.float(1)
    return c.one_of(
        f"{x}.repeat({', '.join(str(1 + c.number(2)) for _ in c.shape(x))})", f"{x}.repeat_interleave(2, {c.dim(x)})"
    )


# Views


@step("view")
def transpose(c):
    x = c.float(2)
    return c.one_of(f"{x}.transpose({c.dim(x)}, {c.dim(x)})", f"{x}.mT", f"{x}.movedim({c.dim(x)}, {c.dim(x)})")


@step("view")
def permute(c):
    x = c.float(1)
    dims = list(range(len(c.shape(x))))
    order = [dims.pop(c.number(len(dims))) for _ in range(len(dims))]
    return f"{x}.permute({', '.join(map(str, order))})"


@step("view")
def flatten(c):
    x = c.float(1)
    dims = sorted([c.dim(x), c.dim(x)])
    return f"{x}.flatten({dims[0]}, {dims[1]})"


@step("view")
def unflatten(c):
    x = c.float(1, 3, filled=True)
    dim = c.dim(x)
    n = c.shape(x)[dim]
    k = c.one_of(*[k for k in range(1, n + 1) if n % k == 0])
    return f"{x}.unflatten({dim}, {c.one_of((k, -1), (-1, k))})"


@step("view")
def view(c):
    x = c.float()
    y = c.value(lambda y: y.numel() == c.tensor(x).numel())
    return f"{x}.{c.one_of('reshape', 'view')}({c.shape(y) if c.switch() else -1})"


@step("view")
def split_view(c):
    x = c.float(1, 3, filled=True)
    *rest, n = c.shape(x)
    k = c.one_of(*[k for k in range(1, n + 1) if n % k == 0])
    return f"{x}.{c.one_of('reshape', 'view')}({', '.join(map(str, (*rest, k, n // k)))})"


@step("view")
def unsqueeze(c):
    x = c.float(0, 3)
    return f"{x}.unsqueeze({c.number(len(c.shape(x)) + 1)})"


@step("view")
def squeeze(c):
    """By its dims: otherwise a batch of one would be squeezed, too, and what follows has a dim less than it says."""
    x = c.value(lambda x: x.is_floating_point() and 1 in x.shape)
    ones = [d for d, n in enumerate(c.shape(x)) if n == 1]
    return f"{x}.squeeze({c.one_of(ones[0], tuple(ones))})"


@step("view")
def expand(c):
    x = c.float(0, 3)
    sizes = [c.size() if n == 1 else -1 for n in c.shape(x)]
    return f"{x}.expand({', '.join(map(str, (c.size(), *sizes)))})"


@step("view")
def detach(c):
    return f"{c.float()}.detach()"


# Factories


@step("factory")
def like(c):
    x = c.float()
    return c.one_of("torch.zeros_like({0}) + {0}", "torch.ones_like({0}) * {0}", "torch.full_like({0}, 0.5)").format(x)


@step("factory")
def new(c):
    x = c.float(1)
    return f"{x} + {x}.{c.one_of('new_ones', 'new_zeros')}({c.shape(x)[-1:]})"


# Writes in place


@step("write")
def write(c):
    x = target(c)
    call = c.one_of(
        *("add_({0}.detach())", "mul_(2)", "zero_()", "fill_(0.5)", "copy_({1})", "add_({1})", "mul_({1})", "sin_()"),
        *("clamp_(-1, 1)", "neg_()", "sub_({1})", "div_(3)", "relu_()", "addcmul_({1}, {1})", "lerp_({1}, 0.5)"),
    )
    return f"!{x}.{call}".format(x, broadcast(c, x) if "{1}" in call else "")


@step("write")
def masked_fill_(c):
    x = target(c)
    return f"!{x}.masked_fill_({c.distinct(broadcast(c, x))} > 0.1, 0.25)"


@step("write")
def setitem(c):
    x = target(c, 1)
    dim = c.dim(x)
    part = c.one_of("0", "1:", ":-1", "::2", "-1")
    return f"!{x}[{':, ' * dim}{part}] = {c.one_of('0.5', c.of_shape(()))}"


@step("write")
def set_part(c):
    x = target(c, 1, filled=True)
    dim = c.dim(x)
    k = 1 + c.number(c.shape(x)[dim])
    source = c.of_shape([k if d == dim else n for d, n in enumerate(c.shape(x))])
    return f"!{x}.narrow({dim}, {c.number(c.shape(x)[dim] - k + 1)}, {k}).{c.one_of('copy_', 'add_')}({source})"


@step("write")
def write_view(c):
    x = target(c, 1, filled=True)
    dim = c.dim(x)
    view = c.one_of(f"select({dim}, 0)", "flatten()", "unsqueeze(0)", f"transpose(0, {dim})", f"unbind({dim})[-1]")
    return f"!{x}.{view}.{c.one_of('mul_(2)', 'add_(1)', 'zero_()', 'sin_()')}"


@step("write")
def index_put_(c):
    x = target(c, 1, filled=True)
    n = c.size()
    return (
        f"!{x}.index_put_(({c.input((n,), high=c.shape(x)[0])},), {c.of_shape((n, *c.shape(x)[1:]))}, accumulate=True)"
    )


@step("write")
def index_add_(c):
    x = target(c, 1, filled=True)
    dim, n = c.dim(x), c.size()
    source = c.of_shape([n if d == dim else m for d, m in enumerate(c.shape(x))])
    return f"!{x}.index_add_({dim}, {c.input((n,), high=c.shape(x)[dim])}, {source})"


def target(c: Choices, low: int = 0, filled: bool = False) -> str:
    """A value that may be written to: no leaf that takes a gradient; with others on its memory only where the
    feature is on."""
    known = c.building.values
    return c.value(
        lambda x: (
            x.is_floating_point()
            and x.dim() >= low
            and (x.numel() or not filled)
            and not (x.is_leaf and x.requires_grad)
            and c.building.may_write(next(k for k, v in known.items() if v is x))
        )
    )


# Modules


@step("module")
def nn_linear(c):
    x = c.float(2)
    n = c.shape(x)[-1]
    c.need(n)
    return f"{c.module(f'nn.Linear({n}, {max(c.size(), 1)})')}({x}.double())"


@step("module")
def nn_layer_norm(c):
    x = c.float(2)
    c.need(c.shape(x)[-1])
    return f"{c.module(f'nn.LayerNorm({c.shape(x)[-1]})')}({x}.double())"


@step("module")
def nn_embedding(c):
    c.feature_of_twice("second derivatives of embeddings")
    rows, width = max(c.size(), 1), max(c.size(), 1)
    i = c.input((c.size(), c.size()), high=rows)
    return f"{c.module(f'nn.Embedding({rows}, {width})')}({i})"


@step("module")
def perceptron(c):
    x = c.float(2)
    c.need(c.shape(x)[-1])
    return f"{c.module(f'Perceptron({c.shape(x)[-1]})')}({x}.double())"


@step("module")
def block(c):
    x = c.float(3, 3)
    n = c.shape(x)[-1]
    c.need(n)
    if 0 in c.shape(x):
        c.feature("attention over empty dimensions")
    heads = c.one_of(*[k for k in range(1, n + 1) if n % k == 0])
    return f"{c.module(f'Block({n}, {heads})')}({x}.double())"
