"""The layout, enforced on the source text: links, import arrows, dimension letters, the README's map."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from ready_jax.kernels import dispatch

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("kernels", "configs", "train", "serve")
CORE = "core"
MAY_IMPORT = {
    CORE: {CORE, "kernels"},
    "kernels": {"kernels"},
    "configs": {"configs", CORE, "kernels"},
    "train": {"train", "configs", CORE, "kernels"},
    "serve": {"serve", "configs", CORE, "kernels"},
}
LAZY_IN_INIT = {"train"}  # `ready_jax.train` as an attribute: imported when it is asked for, never at import
SHAPE_SUFFIX = re.compile(r"_(?P<shape>[A-Z][A-Z0-9]*)$")


def modules() -> list[tuple[str, Path]]:
    """(layer, path) of every module of ours, each once, by its real place."""
    core = [(CORE, path) for path in sorted((ROOT / "ready_jax").glob("*.py"))]
    return core + [(layer, path) for layer in LINKED for path in sorted((ROOT / layer).rglob("*.py"))]


MODULES = modules()


def each_module(test):
    """Parametrise over the modules that exist when the tests are collected."""
    return pytest.mark.parametrize(
        ("layer", "path"), MODULES, ids=[str(path.relative_to(ROOT)) for _, path in MODULES]
    )(test)


# Links


@pytest.mark.parametrize("folder", LINKED)
def test_the_link_points_to_the_folder_beside_the_package(folder: str):
    link = ROOT / "ready_jax" / folder
    assert link.is_symlink(), f"ready_jax/{folder} must be a symbolic link: a copy would load every type twice"
    assert str(link.readlink()) == f"../{folder}", "relative, so that a clone works anywhere"
    assert link.resolve() == ROOT / folder


@pytest.mark.parametrize("folder", LINKED)
def test_the_real_folder_is_no_package_of_its_own(folder: str):
    assert (ROOT / folder).is_dir()
    assert not list((ROOT / folder).rglob("__init__.py")), "an __init__.py would make `import train` work"


def test_the_package_has_no_other_folders_with_code():
    strays = [p for p in (ROOT / "ready_jax").rglob("*.py") if p.parent != ROOT / "ready_jax"]
    strays = [p for p in strays if p.relative_to(ROOT / "ready_jax").parts[0] not in LINKED]
    assert strays == []


# Arrows


def layer_of(dotted: str) -> str | None:
    """The layer that importing `dotted` reaches; None for other people's modules and the package as a whole."""
    parts = dotted.split(".")
    if parts[0] in LINKED:
        return f"bare {parts[0]}"
    if parts[0] != "ready_jax" or len(parts) == 1:
        return None
    return parts[1] if parts[1] in LINKED else CORE


def imports(tree: ast.Module, package: str) -> Iterator[tuple[str, int, bool]]:
    """(dotted name, line, whether it runs at import) of each import, also of one by a string of its full name."""

    def visit(node: ast.AST, at_import: bool) -> Iterator[tuple[str, int, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]) if base else ".".join(above)
            yield from ((f"{base}.{alias.name}", node.lineno, at_import) for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"ready_jax(\.\w+)+", str(node.value)):
            yield str(node.value), node.lineno, False
        inside = at_import and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            inside = False
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(tree, True)


def forbidden_imports(source: str, layer: str, name: str) -> list[str]:
    package = "ready_jax" if layer == CORE else f"ready_jax.{layer}"
    wrong = []
    for dotted, line, at_import in imports(ast.parse(source), package):
        reached = layer_of(dotted)
        if reached is None or reached in MAY_IMPORT[layer]:
            continue
        if layer == CORE and name == "__init__.py" and reached in LAZY_IN_INIT and not at_import:
            continue
        wrong.append(f"{name}:{line} imports {dotted}: {layer} may import only {', '.join(sorted(MAY_IMPORT[layer]))}")
    return wrong


@each_module
def test_imports_follow_the_arrows(layer: str, path: Path):
    assert forbidden_imports(path.read_text(), layer, path.name) == []


@pytest.mark.parametrize(
    ("layer", "name", "source"),
    [
        ("kernels", "x.py", "from ready_jax import config"),
        ("kernels", "x.py", "def f():\n    import ready_jax.config"),
        ("kernels", "x.py", "from .. import config"),
        (CORE, "x.py", "from ready_jax.train import loop"),
        (CORE, "x.py", "def f():\n    from ready_jax import serve"),
        (CORE, "x.py", "import importlib\nimportlib.import_module('ready_jax.configs.nano')"),
        (CORE, "__init__.py", "from ready_jax import train"),
        (CORE, "__init__.py", "def f():\n    from ready_jax import serve"),
        ("configs", "x.py", "from ready_jax.train import loop"),
        ("train", "x.py", "from ready_jax.serve.generate import generate"),
        ("serve", "x.py", "from ..train import loop"),
        ("train", "x.py", "import configs"),
        ("serve", "x.py", "from kernels import dispatch"),
    ],
)
def test_the_arrows_would_catch(layer: str, name: str, source: str):
    assert len(forbidden_imports(source, layer, name)) == 1


@pytest.mark.parametrize(
    ("layer", "name", "source"),
    [
        ("kernels", "x.py", "from ready_jax.kernels import dispatch\nfrom . import dispatch"),
        (CORE, "x.py", "import ready_jax\nfrom ready_jax import config\nfrom ready_jax.kernels import dispatch"),
        (CORE, "__init__.py", "def f():\n    from ready_jax import train"),
        ("train", "x.py", "from ready_jax.configs import nano\nfrom ready_jax import decode\nimport trainax"),
    ],
)
def test_the_arrows_allow(layer: str, name: str, source: str):
    assert forbidden_imports(source, layer, name) == []


# Dimension letters


def dimension_letters() -> list[str]:
    """The keys of `DIMS: dict[str, str] = {...}` in dims.py, as written: a repeated key is seen twice."""
    for node in ast.parse((ROOT / "ready_jax/dims.py").read_text()).body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if any(isinstance(t, ast.Name) and t.id == "DIMS" for t in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            assert isinstance(node.value, ast.Dict)
            return [key.value for key in node.value.keys if isinstance(key, ast.Constant)]  # pyright: ignore[reportReturnType]
    raise AssertionError("ready_jax/dims.py must define DIMS as a dict literal")


def test_each_letter_means_one_thing():
    letters = dimension_letters()
    assert letters
    assert all(re.fullmatch("[A-Z]", letter) for letter in letters), letters
    assert sorted(set(letters)) == sorted(letters), "a letter is defined twice"


def shapes(annotation: ast.AST, direct: bool = True) -> Iterator[tuple[str, bool]]:
    """(shape string, whether the name is that array itself) of the jaxtyping annotations inside.

    `Float[Array, "B T"] | None` is the array; `tuple[Float[Array, "B T"], ...]` and other containers only hold it.
    """
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            yield from shapes(ast.parse(annotation.value, mode="eval").body, direct)
        except SyntaxError:
            return
    elif isinstance(annotation, ast.BinOp):
        yield from shapes(annotation.left, direct)
        yield from shapes(annotation.right, direct)
    elif isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple):
        elements = annotation.slice.elts
        if len(elements) == 2 and isinstance(elements[1], ast.Constant) and isinstance(elements[1].value, str):
            yield elements[1].value, direct
        else:
            for element in elements:
                yield from shapes(element, False)
    else:
        for child in ast.iter_child_nodes(annotation):
            yield from shapes(child, False)


def suffix_of(shape: str) -> str | None:
    """The suffix that a shape asks for: "B T 3" gives "BT3", "" gives ""; None where it has sizes without a letter."""
    tokens = [token.lstrip("#") for token in shape.split()]
    return "".join(tokens) if all(re.fullmatch("[A-Z]|[0-9]", token) for token in tokens) else None


def names(tree: ast.Module) -> Iterator[tuple[str, int, ast.AST | None]]:
    """(name, line, annotation) of each parameter, annotated field or variable, and assigned name or attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg, node.lineno, node.annotation
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name | ast.Attribute):
            target = node.target
            yield target.id if isinstance(target, ast.Name) else target.attr, node.lineno, node.annotation
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno, None
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno, None


def wrong_suffixes(source: str, letters: set[str]) -> list[str]:
    wrong = []
    for name, line, annotation in names(ast.parse(source)):
        found = SHAPE_SUFFIX.search(name) if not name.isupper() else None
        suffix = found["shape"] if found else ""
        unknown = sorted({letter for letter in suffix if letter.isalpha()} - letters)
        if unknown:
            wrong.append(f"line {line}: {name} uses {', '.join(unknown)}, which ready_jax/dims.py does not define")
        for shape, direct in shapes(annotation) if annotation is not None else ():
            unknown = sorted(set(re.findall(r"\b[A-Z]\b", shape)) - letters)
            if unknown:
                wrong.append(f"line {line}: {name}: {shape!r} uses {', '.join(unknown)}, not in ready_jax/dims.py")
            needed = suffix_of(shape)
            if direct and needed is not None and needed != suffix:
                wrong.append(f"line {line}: {name} is annotated {shape!r}, so its name must end in _{needed}")
    return wrong


@each_module
def test_names_carry_their_shapes(layer: str, path: Path):
    assert wrong_suffixes(path.read_text(), set(dimension_letters())) == []


@pytest.mark.parametrize(
    "source",
    [
        'def f(hidden_BT: Float[Array, "B T D"]): ...',
        'def f(hidden: Float[Array, "B T D"] | None = None): ...',
        "def f(*, hidden_TB: \"Float[Array, 'B T']\"): ...",
        'class C:\n    s_BXM: Float[Array, "B M X"]',
        'def f(x_B: Float[Array, ""]): ...',
        'def f(states: list[Float[Array, "B Z"]]): ...',
        'def f(x_Bq: Float[Array, "B Ω Q"], y_BQ: Float[Array, "Q B"]): ...',
        "w_Ö_Q2DJ = 1",
        "def f(self):\n    self.w_J = 1",
    ],
)
def test_the_suffix_rule_would_catch(source: str):
    assert len(wrong_suffixes(source, set("BTDMXQ"))) == 1


def test_the_suffix_rule_allows():
    source = """
MAX_B_J = 1
loss_sum = count = 0
def f(hidden_BTD: BF16[Array, "B T D"], pair_B2: Int[Array, "B 2"], any_size: Float[Array, "B T+1"], n: int,
      scale: Float[Array, ""], w_D: Float[Array, "#D"] | None = None, tree: PyTree[Float[Array, "..."]] = (),
      states: tuple[Float[Array, "B T"], ...] | dict[int, Float[Array, "D"]] | None = None):
    w_out_DT[...] = 1
"""
    assert wrong_suffixes(source, set("BTD")) == []


# Strictness: what conftest.py promises


def test_annotations_are_checked_in_the_linked_folders_too():
    with pytest.raises(jaxtyping.TypeCheckError):
        dispatch.choose(3, (dispatch.Implementation("one", None, dispatch.always),))  # pyright: ignore[reportArgumentType]


def test_the_cpu_is_four_devices_and_rank_promotion_raises():
    assert jax.default_backend() != "cpu" or jax.device_count() == 4
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.add(jnp.ones((2, 3)), jnp.ones((3,)))


# README


@pytest.fixture
def readme() -> str:
    path = ROOT / "README.md"
    return path.read_text()


def test_the_readme_is_one_sitting(readme: str):
    assert len(readme.splitlines()) <= 120


def test_the_readme_maps_every_folder_and_module(readme: str):
    tree = "\n".join(re.findall(r"^```[^\n]*\n(.*?)^```", readme, flags=re.MULTILINE | re.DOTALL))
    ignored = {line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    folders = [p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".") and p.name not in ignored]
    folders = [name for name in folders if name != "shared" and not name.endswith(".egg-info")]
    missing = [f"{name}/" for name in folders if f"{name}/" not in tree]
    missing += [str(p.relative_to(ROOT)) for _, p in MODULES if not re.search(rf"\b{p.stem}\b", tree)]
    assert missing == [], "the README's file tree (in a code block) must mention these"


def test_the_readme_names_no_module_that_is_gone(readme: str):
    known = {path.name for path in [path for _, path in MODULES] + list((ROOT / "tests").glob("*.py"))}
    assert sorted(set(re.findall(r"(?<![\w<>*.])\w+\.py\b", readme)) - known) == []
