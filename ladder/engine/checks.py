"""What is checked of the engine's arguments and files: one place for
the errors that name what came and what is wanted."""

import json
import math
import numbers
from dataclasses import fields
from pathlib import Path

from ladder.contract import check_flag, check_integer


def check_number(owner, name, value, least=0.0, most=math.inf, *, above=False):
    """Return ``value`` as a float: finite, ``least`` .. ``most``, more than ``least`` with ``above``.

    Raises:
        TypeError: it is no real number (a bool is none, numpy's are). ValueError: it is none of these.
    """
    wanted = f"a number {'above' if above else 'of at least'} {least:g}" + (
        f", at most {most:g}" if most < math.inf else ""
    )
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{owner}: {name} is {value!r}; want {wanted}")
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not (least < number <= most or not above and number == least) or number == math.inf:
        raise ValueError(f"{owner}: {name} is {value if number != math.inf else number}; want {wanted}")
    return number


def check_sizes(owner, config, zero=(), names=None):
    """Check the fields of a frozen dataclass by their types: int (at
    least 1, or 0 for those in ``zero``), float (above 0), bool.

    names: {field: what else an error calls it}.
    """
    for field in fields(config):
        name, value = field.name, getattr(config, field.name)
        told = f"{name} ({names[name]})" if names and name in names else name
        if field.type is int:
            object.__setattr__(config, name, check_integer(owner, told, value, 0 if name in zero else 1))
        elif field.type is float:
            object.__setattr__(config, name, check_number(owner, told, value, above=True))
        elif field.type is bool:
            check_flag(owner, told, value)


def read_json(owner, path):
    """The object in a JSON file; ValueError that names the file when it holds none."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # also what is no UTF-8
        raise ValueError(f"{owner}: {path} is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{owner}: {path} holds a {type(found).__name__}; want a JSON object")
    return found
