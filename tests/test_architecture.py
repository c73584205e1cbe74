"""The dependency rule: a module imports only from the layers below its own."""

import ast
from pathlib import Path

import pytest

import wgsl_train

ROOT = Path(wgsl_train.__file__).parent
LAYERS = [
    {"errors", "interrupts"},
    {"config"},
    {"kernel", "data", "checkpoint", "quantize"},
    {"tuned"},
    {"plan", "device"},
    {"ops", "encoder"},
    {"models", "trial", "anomaly", "precision"},
    {"model"},
    {"profile", "reload"},
    {"train", "tune"},
    {"doctor", "plot", "tensorboard"},
    {"cli"},
]
LEVEL = {name: i for i, names in enumerate(LAYERS) for name in names}
MODULES = [p for p in sorted(ROOT.rglob("*.py")) if p.name not in ("__init__.py", "__main__.py")]
# Ops share the sums of partial gradients, the matrix products, the adapters of small weights and the
# states that are carried; models may build on each other
SHARED_OPS = {"sum_partials", "linear", "low_rank", "carry"}


def imports(path: Path) -> list[str]:
    """Dotted names relative to the package for its own modules, absolute for others."""
    depth = len(path.relative_to(ROOT).parts) - 1
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            package = path.relative_to(ROOT).parts[: depth + 1 - node.level]
            prefix = ".".join(["wgsl_train", *package])
            module = f"{prefix}.{node.module}" if node.module else prefix
            names += [f"{module}.{a.name}" for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(str(node.module))
        elif isinstance(node, ast.Import):
            names += [a.name for a in node.names]
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "wgsl_train" and len(parts) > 1 and parts[1] in LEVEL:
            down = LEVEL[parts[1]] < LEVEL[own]
            sibling = parts[1] == own and (own == "models" or parts[2] in SHARED_OPS)
            assert down or sibling, f"{path.name}: {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_encoder_and_the_device_know_wgpu(path):
    knows = any(n.split(".")[0] == "wgpu" for n in imports(path))
    assert not knows or path.name in {"encoder.py", "device.py"}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_oracle_stays_with_the_tests(path):
    assert not any(n.split(".")[0] == "tests" for n in imports(path))
