"""Why a frame is compiled again, in the user's terms.

Dynamo says for each compiled code of the frame which guard failed first, such as "tensor 'x' size mismatch at index 0.
expected 4, actual 6". `RULES` has what such a text means. Of several codes the one counts that comes nearest: a code
for another grad mode says nothing if there is one for this mode and another size.
"""

import re
from collections.abc import Callable, Sequence

import torch

KEPT = 160
"""The most characters of a guard that no rule knows."""

DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
"""C++ name of a dtype -> its name in Python."""


def _gradients() -> str:
    on = torch.is_grad_enabled()
    how = "" if on else " (torch.no_grad or torch.inference_mode)"
    return f"gradients are {_ON[on]} now{how}, and were {_ON[not on]}"


def _autocast(name: str) -> str:
    device = name.partition("(")[2].partition(")")[0]
    on = torch.is_autocast_enabled(device)
    return f"torch.autocast is {_ON[on]} now, and was {_ON[not on]}"


_ON = {True: "on", False: "off"}


def _settings(found: re.Match[str]) -> str:
    return ", ".join([_setting(name) for name in found[1].split()])


def _setting(name: str) -> str:
    if name == "grad_mode":
        return _gradients()
    if name.startswith("autocast(") and name.endswith("_enabled"):
        return _autocast(name)
    if name == "default_dtype":
        return f"the default dtype is {torch.get_default_dtype()} now"
    return f"torch's setting {name} is another"


def _kind(found: re.Match[str]) -> str:
    return f"{named(found[1])} is no longer {found[2].rpartition('.')[2]}"


def _dtype(found: re.Match[str]) -> str:
    before, now = (DTYPES.get(name, name) for name in (found[2], found[3]))
    return f"{named(found[1])} is {now}, and was {before}"


def _requires_grad(found: re.Match[str]) -> str:
    did = found[2] == "1"
    return f"{named(found[1])} requires {'no' if did else 'a'} gradient now, and {'did' if did else 'did not'} before"


def _training(found: re.Match[str]) -> str:
    mode, before = ("in evaluation mode", "in training mode")[:: 1 if found[2] == "True" else -1]
    return f"{named(found[1])} is {mode} now, and was {before}"


def _keys(found: re.Match[str]) -> str:
    before, now = ("Autograd" in found[k] for k in (2, 3))
    if before == now:
        return f"{named(found[1])} is a tensor of another kind: its dispatch keys differ"
    made = ("was made under torch.inference_mode", "was not")[:: 1 if before else -1]
    return f"{named(found[1])} {made[0]}, and {made[1]} before"


def _layout(found: re.Match[str]) -> str:
    where = re.search(r"# ([\w/.-]+:\d+) in ", found[0])
    at = f" (first used at {where[1]})" if where else ""
    return f"a DTensor has other placements, dimensions or another mesh{at}"


Rule = tuple[str, Callable[[re.Match[str]], str]]

RULES: tuple[Rule, ...] = (
    (r"GLOBAL_STATE changed: (.*)", _settings),
    (r"___check_type_id\((.+?), \d+\), type=<class '(.+?)'>", _kind),
    (r"(.+?)\.training == (True|False)", _training),
    (r"((?!.*size\(\))\S+) == (.+)", lambda m: f"{named(m[1])} is no longer {_code(m[2])}"),
    (r"tensor '(.+)' rank mismatch\. expected (\d+), actual (\d+)", lambda m: _counts(m, "dimensions")),
    (r"tensor '(.+)' dtype mismatch\. expected (\w+), actual (\w+)", _dtype),
    (r"___check_metadata_.*", _layout),
    (r"tensor '(.+)' dispatch key set mismatch\. expected (.+), actual (.+)", _keys),
    (r"tensor '(.+)' requires_grad mismatch\. expected requires_grad=(\d)", _requires_grad),
    (
        r"tensor '(.+)' size mismatch at index (\d+)\. expected (\d+), actual (\d+)",
        lambda m: f"dim {m[2]} of {named(m[1])} has length {m[4]}, and had {m[3]}",
    ),
    (
        r"tensor '(.+)' stride mismatch at index (\d+)\. expected (\d+), actual (\d+)",
        lambda m: f"dim {m[2]} of {named(m[1])} has stride {m[4]}, and had {m[3]}",
    ),
    (r"(.+)", lambda m: f"{_code(m[1])} no longer holds"),
)
"""What Dynamo says of a guard -> what it means, that of the codes farthest from what is needed first."""


def _counts(found: re.Match[str], of: str) -> str:
    return f"{named(found[1])} has {found[3]} {of}, and had {found[2]}"


def why_again(reasons: Sequence[str]) -> str:
    """Why none of the codes of a frame holds, from what Dynamo says of each."""
    found = [_told(reason) for reason in reasons]
    return max(found, key=lambda place_and_text: place_and_text[0], default=(0, "torch.compile gives no reason"))[1]


def _told(reason: str) -> tuple[int, str]:
    """The place of the rule for a reason, and what it means."""
    text = re.sub(r"^\d+/\d+(_\d+)?: ", "", reason.split("\n")[0]).strip()
    matches = ((place, re.match(pattern, text), say) for place, (pattern, say) in enumerate(RULES))
    return next(((place, say(match)) for place, match, say in matches if match), (0, text))


def named(source: str) -> str:
    """How a user would write what Dynamo calls `source`: L['self']._modules['drop'] is self.drop."""
    text = re.sub(r"\b[LG]\['(\w+)'\]", r"\1", source)
    text = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", text)
    return text.replace("._local_tensor", "")


def _code(text: str) -> str:
    return named(re.split(r"\s+# ", text)[0].strip())[:KEPT]


__all__ = ["named", "why_again"]
