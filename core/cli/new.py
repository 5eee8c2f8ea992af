"""`foredraft new`: a package for a plugin of your own, ready to install, to test and to publish."""

import keyword
import re
from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from .. import __version__
from ..errors import ForedraftError

commands = typer.Typer(help="Write a package for a plugin of your own.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(help="its name, in lower case: my_model")]
DirectoryOption = Annotated[Path | None, typer.Option(help="directory to write; default: foredraft-NAME")]

KNOWN = "from transformers import AutoConfig\n"
STAND_IN_IMPORTS = "from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM\n"
STAND_IN = '''

class TargetConfig(LlamaConfig):
    """Stands for the config of your targets: import theirs, and drop these classes."""

    model_type = "$model_type"


class Target(LlamaForCausalLM):
    config_class = TargetConfig


AutoConfig.register("$model_type", TargetConfig)
AutoModelForCausalLM.register(TargetConfig, Target)
'''


@commands.command()
def adapter(
    name: NameArgument,
    model_type: Annotated[str | None, typer.Option(help="the targets' model_type, as in their config.json; default: NAME")] = None,
    directory: DirectoryOption = None,
) -> None:
    """A package with drafts for one more family of targets."""
    from transformers import CONFIG_MAPPING

    from ..registry import default_registry

    directory, model_type = checked("adapter", name, directory), model_type or name
    for r in default_registry().registered:
        if r.kind == "adapter" and model_type in r.cls.model_types:
            raise ForedraftError(
                f"targets of model_type '{model_type}' have an adapter: '{r.name}' of {r.distribution}. Two would be an error; subclass it "
                "under another name without the model_type, and choose it by `adapter:` in the run"
            )
    known = model_type in CONFIG_MAPPING
    write(
        "adapter",
        name,
        directory,
        model_type=model_type,
        class_name=f"{camel(name)}Draft",
        about=f"Drafts for {model_type} targets",
        imports=KNOWN if known else STAND_IN_IMPORTS,
        stand_in="" if known else Template(STAND_IN).substitute(model_type=model_type),
        tiny_config=f'AutoConfig.for_model("{model_type}", **TINY)' if known else "TargetConfig(**TINY)",
        use="Once installed, `foredraft train` takes it for every target of that model_type.",
    )


@commands.command()
def algorithm(name: NameArgument, directory: DirectoryOption = None) -> None:
    """A package with one more drafting algorithm."""
    write(
        "algorithm",
        name,
        checked("algorithm", name, directory),
        about=f"The drafting algorithm {name}",
        use=f"Once installed, a run file with `algorithm: {name}` trains with it, whatever the target.",
    )


@commands.command()
def engine(name: NameArgument, directory: DirectoryOption = None) -> None:
    """A package with one more serving system."""
    write(
        "engine",
        name,
        checked("engine", name, directory),
        about=f"Drafts served by {name}",
        use=f"Once installed, `foredraft serve-command --engine {name}` prints the command, and `foredraft doctor` tells what it refuses.",
    )


@commands.command("format")
def form(name: NameArgument, directory: DirectoryOption = None) -> None:
    """A package with one more way to write a draft down."""
    write(
        "format",
        name,
        checked("format", name, directory),
        about=f"Drafts as {name} writes them",
        use=f"Once installed, `foredraft import` reads such drafts, and `foredraft export --format {name}` writes them.",
    )


def checked(kind: str, name: str, directory: Path | None) -> Path:
    """The directory to write. Raises `ForedraftError` for a name that cannot be, or that is taken, and for a directory that is there."""
    from ..registry import default_registry

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ForedraftError(f"'{name}' cannot name a module: use lower-case letters, digits and underscores, as in my_{kind}")
    if owners := [r.distribution for r in default_registry().registered if (r.kind, r.name) == (kind, name)]:
        raise ForedraftError(f"there is {kind} '{name}' already, from {' and '.join(owners)}: choose another name")
    directory = directory or Path(f"foredraft-{name.replace('_', '-')}")
    if directory.exists():
        raise ForedraftError(f"'{directory}' is there already: choose another --directory")
    return directory


def write(kind: str, name: str, directory: Path, **values: str) -> None:
    """Fill in the templates."""
    values = {"class_name": camel(name), **values, "kind": kind, "name": name, "module": f"foredraft_{name}"}
    values |= {"suite": f"{camel(kind)}Tests", "versions": versions(__version__)}
    values["distribution"] = values["module"].replace("_", "-")
    templates = resources.files("foredraft") / "templates"
    for template, file in (
        ("pyproject.toml", "pyproject.toml"),
        ("README.md", "README.md"),
        (f"{kind}.py", f"src/{values['module']}/__init__.py"),
        (f"{kind}_test.py", f"tests/test_{name}.py"),
    ):
        text = Template((templates / f"{template}.txt").read_text(encoding="utf-8")).substitute(values)
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        (directory / file).write_text(text, encoding="utf-8")
        print(f"  {directory / file}")
    print(f'next: cd {directory} && pip install -e ".[test]" && pytest')


def versions(version: str) -> str:
    """What a package written against a version asks for: it, and what comes before the next one that may break it."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return f">={version},<{f'0.{minor + 1}' if major == 0 else major + 1}"


def camel(name: str) -> str:
    """`my_model` as a class is called: `MyModel`."""
    return "".join(part.capitalize() for part in name.split("_"))
