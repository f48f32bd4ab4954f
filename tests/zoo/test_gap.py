"""How far the layouts that are decided for the models of the zoo are from the best, by the model of cost."""

import pytest
import torch

from dtensor import distribute_model, init_device_mesh
from dtensor.compile.recording.frames import recent_frames
from dtensor.testing import fake_ranks

from .compare import made, results
from .models import EXAMPLES
from .ways import _cut

NAMES = [
    pytest.param(name, marks=() if name == "graph" else pytest.mark.nightly) for name in EXAMPLES if name != "mamba"
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", NAMES)
def test_at_most_two_percent(name, capsys):
    """Over two ranks. The scan of Mamba, and models as small as these over two axes, have bounds that say little: what
    they pay is for starting collectives."""
    if not EXAMPLES[name].is_installed():
        pytest.skip(f"needs {EXAMPLES[name].needs}; write: pip install 'dtensor-compile[zoo]'")
    torch.compiler.reset()
    before = recent_frames()
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model, given = made(name), EXAMPLES[name].inputs()
        model = distribute_model(model, mesh, EXAMPLES[name].plan, outputs={})
        run = torch.compile(model, backend="dtensor", options={"inner": "aot_eager"})
        results(run(**_cut(name, given, mesh)))[0].backward()
    told = [frame.decided for frame in recent_frames() if frame not in before and frame.decided is not None]
    told = [t for t in told if not t.why]
    assert told
    with capsys.disabled():
        print(f"{name}: {[f'{t.gap:.2%} of {t.seconds * 1e3:.1f} ms' for t in told]}")
    assert all(t.gap <= 0.02 for t in told)
