"""The public API as text: every public name with its signature and, of a class, its attributes. The same on every Python.

Annotations are written by `_type_text` and not by `str`, whose result differs between versions of Python.
"""

import ast
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "public_api"

MODULES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "outbox": {
        "outbox": (),
        "outbox.configuration": ("Settings",),
        "outbox.requests.claim_block": ("IdempotentBlock",),
        "outbox.django": (),
        "outbox.http": (),
        "outbox.http.django": (),
        "outbox.http.fastapi": (),
        "outbox.http.flask": (),
        "outbox.http.starlette": (),
        "outbox.http.status_route": ("StatusRoute",),
        "outbox.requests.inbox": ("InboxBlock",),
        "outbox.inboxes": (),
        "outbox.requests.leases": ("FencedBlock", "LeasedBlock"),
        "outbox.metrics.opentelemetry": (),
        "outbox.metrics.prometheus": (),
        "outbox.migrations": (),
        "outbox.moving": ("copy_scope",),
        "outbox.requests.responses": ("Headers",),
        "outbox.testing": (),
        "outbox.trace_headers": ("Enqueued",),
    },
    "dispatchers": {
        "dispatchers": (),
        "dispatchers.adapters": (),
        "dispatchers.adapters.providers": (),
        "dispatchers.adapters.causes": ("nothing_sent",),
        "dispatchers.adapters.http_client.transport": ("NEVER_SENT", "Answer", "Transport"),
        "dispatchers.admin.decide.bulk": (),
        "dispatchers.admin.read.destinations": ("read_destinations",),
        "dispatchers.admin.read.entry_filter": ("Filter",),
        "dispatchers.dashboard": (),
        "dispatchers.django": (),
        "dispatchers.telemetry.log_ids": ("LogIds",),
        "dispatchers.telemetry.opentelemetry": ("trace",),
        "dispatchers.telemetry.prometheus": (),
        "dispatchers.testing": (),
        "dispatchers.testing.faulty_http": (),
        "dispatchers.testing.stripe_core": ("API_KEY", "FakeStripe"),
        "dispatchers.testing.stripe_ledger": ("Effect", "StripeLedger"),
    },
}
"""The modules of each distribution's folder that the documents name. Without names: those in `__all__`, or defined there."""

HANDED_OUT = {"AsyncLeasedClaim", "Claim", "FencedBlock", "IdempotentBlock", "InboxBlock", "LeasedBlock", "LeasedClaim"}
"""Classes whose objects an app only gets: their constructors are not public, and no snapshot has them."""

INDENT = "    "


IMPORT = re.compile(r"^ *from ((?:outbox|dispatchers)[\w.]*) import ([\w, ]+)$", re.MULTILINE)


def documented_names() -> set[tuple[str, str]]:
    """The module and the name of everything that a snippet of the documents imports."""
    root = FOLDER.parents[1]
    texts = [page.read_text() for page in (root / "README.md", *(root / "docs").rglob("*.md"))]
    found = [match.groups() for text in texts for match in IMPORT.finditer(text)]
    return {(module, name.strip()) for module, names in found for name in names.split(",")}


def is_in_snapshot(module: str, name: str) -> bool:
    """Whether a snapshot has this name of the module, or the module of this name."""
    modules = {each for names in MODULES.values() for each in names}
    if f"{module}.{name}" in modules or module not in modules:
        return f"{module}.{name}" in modules
    kept = read_snapshot(module.partition(".")[0])[module]
    return re.search(rf"^(?:async |class )?{name}\b", kept, re.MULTILINE) is not None


def snapshot_path(package: str) -> Path:
    return FOLDER / f"{package}.txt"


def read_snapshot(package: str) -> dict[str, str]:
    """What the file says of each module."""
    parts = re.split(r"^# (.+)\n", snapshot_path(package).read_text(), flags=re.MULTILINE)[1:]
    return {name: text.strip("\n") for name, text in zip(parts[::2], parts[1::2], strict=True)}


def write_snapshots() -> None:
    """Write the files again; needs all extras."""
    for package, modules in MODULES.items():
        text = "\n\n".join(f"# {module}\n\n{describe(package, module)}" for module in modules)
        snapshot_path(package).write_text(text + "\n")


def describe(package: str, module: str) -> str:
    """Every public name of a module, one paragraph for each class."""
    home = import_module(module)
    names = MODULES[package][module] or getattr(home, "__all__", None) or _defined_in(home)
    return "\n".join(line for name in sorted(names) for line in _name_lines(name, getattr(home, name)))


def _defined_in(module: types.ModuleType) -> list[str]:
    found = vars(module).items()
    return [
        name
        for name, value in found
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]


def _name_lines(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, type) and not isinstance(value, types.GenericAlias):
        yield from _class_lines(name, value)
    elif inspect.isroutine(value):
        yield from _function_lines(name, value)
    elif isinstance(value, types.UnionType) or typing.get_origin(value) is not None:
        yield f"{name} = {_type_text(value)}"
    else:
        yield f"{name}: {_type_text(type(value))}"


# --- classes


def _class_lines(name: str, cls: type) -> Iterator[str]:
    bases = ", ".join(_type_text(base) for base in _bases(cls))
    yield f"class {name}" + (f"({bases})" if bases else "")
    if typing.is_typeddict(cls) or issubclass(cls, Enum):
        members = cls.__members__ if issubclass(cls, Enum) else _typed_dict_lines(cls)
        yield from (INDENT + member for member in members)
        return
    is_made_by_apps = name not in HANDED_OUT and not getattr(cls, "_is_protocol", False)
    if is_made_by_apps and ("__init__" in _own_names(cls) or is_dataclass(cls)):
        yield from (INDENT + line for line in _function_lines("__init__", cls.__init__, is_method=True))  # type: ignore[misc]
    for member in sorted(public_members(cls)):
        yield from (INDENT + line for line in _member_lines(cls, member))


def _bases(cls: type) -> list[Any]:
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return [typing.NamedTuple]  # before Python 3.12 its bases do not show it
    return [
        base for base in vars(cls).get("__orig_bases__", cls.__bases__) if base is not object and not _is_private(base)
    ]


def _is_private(base: Any) -> bool:
    return getattr(typing.get_origin(base) or base, "__name__", "").startswith("_")


def _ours(cls: type) -> list[type]:
    return [each for each in cls.__mro__ if each.__module__.partition(".")[0] in MODULES]


def _own_names(cls: type) -> set[str]:
    return {name for each in _ours(cls) for name in vars(each)}


def public_members(cls: type) -> set[str]:
    named = {name for each in _ours(cls) for name in (*vars(each), *inspect.get_annotations(each), *_assigned(each))}
    special = {
        "__enter__",
        "__exit__",
        "__aenter__",
        "__aexit__",
        "__call__",
        "__contains__",
        "__getitem__",
        "__iter__",
    }
    return {name for name in named if not name.startswith("_") or name in special}


def _assigned(cls: type) -> dict[str, str]:
    """The attributes that its constructor sets, with their annotations if they have one."""
    constructor = vars(cls).get("__init__")
    if constructor is None or is_dataclass(cls) or not inspect.isfunction(constructor):
        return {}
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(constructor)))):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                found[target.attr] = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
    return found


def _member_lines(cls: type, name: str) -> Iterator[str]:
    owner = next(
        each
        for each in _ours(cls)
        if name in vars(each) or name in inspect.get_annotations(each) or name in _assigned(each)
    )
    value = vars(owner).get(name)
    if isinstance(value, property):
        yield f"{name}: {_type_text(inspect.signature(value.fget).return_annotation)}"
    elif isinstance(value, classmethod | staticmethod):
        yield from _function_lines(name, value.__func__, is_method=isinstance(value, classmethod))
    elif inspect.isfunction(value):
        yield from _function_lines(name, value, is_method=True)
    elif name in inspect.get_annotations(owner):
        yield f"{name}: {_type_text(inspect.get_annotations(owner)[name])}"
    elif name in _assigned(owner):
        kind = _assigned(owner)[name]
        yield f"{name}: {kind}" if kind else name
    else:
        yield f"{name} = {_default_text(value)}"


def _typed_dict_lines(cls: Any) -> list[str]:
    required = cls.__required_keys__
    annotations = inspect.get_annotations(cls)
    return [
        f"{key}: {_type_text(_unwrapped(annotations[key]))}{'' if key in required else ' = ...'}"
        for key in sorted(annotations)
    ]


def _unwrapped(annotation: Any) -> Any:
    is_wrapped = typing.get_origin(annotation) in (typing.Required, typing.NotRequired)
    return typing.get_args(annotation)[0] if is_wrapped else annotation


# --- functions


def _function_lines(name: str, function: Any, *, is_method: bool = False) -> Iterator[str]:
    for each in typing.get_overloads(inspect.unwrap(getattr(function, "__func__", function))) or [function]:
        yield _function_text(name, each, is_method=is_method)


def _function_text(name: str, function: Any, *, is_method: bool) -> str:
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if is_method or (not inspect.ismethod(function) and parameters and parameters[0].name == "self"):
        parameters = parameters[1:]
    returned = signature.return_annotation
    arrow = "" if returned is inspect.Signature.empty or name == "__init__" else f" -> {_type_text(returned)}"
    prefix = "async " if inspect.iscoroutinefunction(function) else ""
    return f"{prefix}{name}({', '.join(_parameter_texts(parameters))}){arrow}"


def _parameter_texts(parameters: list[inspect.Parameter]) -> Iterator[str]:
    kinds = inspect.Parameter
    for i, parameter in enumerate(parameters):
        before = parameters[i - 1].kind if i else None
        if before is kinds.POSITIONAL_ONLY and parameter.kind is not kinds.POSITIONAL_ONLY:
            yield "/"
        if parameter.kind is kinds.KEYWORD_ONLY and before not in (kinds.KEYWORD_ONLY, kinds.VAR_POSITIONAL):
            yield "*"
        if parameter.kind is kinds.VAR_KEYWORD and typing.get_origin(parameter.annotation) is typing.Unpack:
            if before not in (kinds.KEYWORD_ONLY, kinds.VAR_POSITIONAL):
                yield "*"
            yield from _typed_dict_lines(typing.get_args(parameter.annotation)[0])
            continue
        yield _parameter_text(parameter)
    if parameters and parameters[-1].kind is kinds.POSITIONAL_ONLY:
        yield "/"


def _parameter_text(parameter: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    text = stars.get(parameter.kind, "") + parameter.name
    if parameter.annotation is not inspect.Parameter.empty:
        text += f": {_type_text(parameter.annotation)}"
    if parameter.default is not inspect.Parameter.empty:
        text += f" = {_default_text(parameter.default)}"
    return text


# --- values and types


def _default_text(value: Any) -> str:
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, type) or inspect.isroutine(value):
        return str(value.__name__)
    if isinstance(value, frozenset | set):
        return f"{{{', '.join(sorted(map(_default_text, value)))}}}"
    text = repr(value).replace("datetime.timedelta(", "timedelta(")
    return "..." if " at 0x" in text or text.startswith("<") else text


def _type_text(annotation: Any) -> str:
    """An annotation as one writes it, with the bare names of types."""
    if annotation is None or annotation is type(None):
        return "None"
    if annotation is ...:
        return "..."
    if isinstance(annotation, str):
        return annotation
    if isinstance(annotation, typing.ForwardRef):
        return annotation.__forward_arg__
    if isinstance(annotation, list):
        return f"[{', '.join(map(_type_text, annotation))}]"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_type_text, arguments))
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(_default_text, arguments))}]"
    if origin is typing.Annotated:
        return _type_text(arguments[0])
    if origin is not None and arguments:
        return f"{_type_name(origin)}[{', '.join(map(_type_text, arguments))}]"
    return _type_name(annotation)


def _type_name(annotation: Any) -> str:
    for name in ("__name__", "_name"):
        found = getattr(annotation, name, None)
        if isinstance(found, str):
            return found
    return re.sub(r"\b\w+\.", "", str(annotation))


if __name__ == "__main__":
    write_snapshots()
