"""Rules by name: from a text such as ``threshold:32:3`` to a decision rule.

The text is ``NAME`` or ``NAME:ARG[:ARG...]``. An argument is ``option=value``, or a value alone, which then
goes to the rule's options in the order of its ``Config`` fields: ``threshold:32:3`` is
``threshold:batch_size=32:num_steps=3``.

A rule is a class with ``name``, ``version`` and a frozen dataclass ``Config`` that validates itself (raising
``PolicyError``), made as ``Rule(context, config)``. A ``Config`` with options of its own shape has the
classmethod ``from_arguments(arguments: tuple[str, ...])``. To add a rule to the package, add a line to
``_RULES``; from elsewhere, call ``register``. A rule's module is imported only when the rule is used.

A text from somebody who may not open files here is read with ``files=False``: options that are texts, which
may name files, then take only what the ``Config``'s static method ``bundled()`` lists, if it has one.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import types
import typing
from typing import Any

from specgov.policies.types import Policy, PolicyContext, PolicyError

_RULES = {
    "static": "specgov.policies.static:Static",
    "threshold": "specgov.policies.threshold:Threshold",
    "schedule": "specgov.policies.schedule:Schedule",
    "ema": "specgov.policies.ema:Ema",
    "greedy": "specgov.policies.greedy:Greedy",
    "thompson": "specgov.policies.thompson:Thompson",
    "throughput_aware": "specgov.policies.throughput_aware:ThroughputAware",
    "nightjar": "specgov.policies.nightjar:Nightjar",
    "banditspec": "specgov.policies.banditspec:BanditSpec",
    "turbospec": "specgov.policies.turbospec:TurboSpec",
    "ucb": "specgov.policies.ucb:Ucb",
    "discounted_ucb": "specgov.policies.ucb:DiscountedUcb",
    "sliding_ucb": "specgov.policies.ucb:SlidingUcb",
    "exp3": "specgov.policies.exp3:Exp3",
    "linucb": "specgov.policies.linucb:LinUcb",
    "ppo": "specgov.policies.ppo:Ppo",
}

_EXPECTED = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text"}
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def register(name: str, target: str) -> None:
    """Make the class ``target``, ``"package.module:Class"``, known as rule ``name``.

    Raises:
        ValueError: the name is taken by another class, or one of the two is malformed.

    """
    if not name or set(name) & set(": ="):
        raise ValueError(f"a rule's name is a word without ':', '=' and spaces, not {name!r}")
    if target.count(":") != 1:
        raise ValueError(f"a rule's target is 'package.module:Class', not {target!r}")
    if _RULES.setdefault(name, target) != target:
        raise ValueError(f"the rule {name!r} is {_RULES[name]} already: choose another name for {target}")


def policy_names() -> tuple[str, ...]:
    """The names of all rules, in the order in which they were registered."""
    return tuple(_RULES)


def make_policy(text: str, context: PolicyContext, *, files: bool = True) -> Policy:
    """The rule that ``text`` names, for one engine.

    Raises:
        PolicyError: no such rule or option, a value that the rule or the engine cannot use.

    """
    rule, config = parse_policy(text, files=files)
    try:
        policy: Policy = rule(context, config)
    except PolicyError as error:
        raise PolicyError(f"policy {text!r}: {error}") from error
    except (ArithmeticError, MemoryError) as error:
        raise PolicyError(f"policy {text!r}: a value is too large: {error}") from error
    return policy


def parse_policy(text: str, *, files: bool = True) -> tuple[type[Any], Any]:
    """The class and the ``Config`` that ``text`` names: all that can be checked before the engine is known.

    Raises:
        PolicyError: no such rule or option, or a value that the rule cannot use.

    """
    name, *arguments = (part.strip() for part in text.split(":"))
    rule = _load(name)
    try:
        return rule, _config(rule.Config, tuple(arguments), files)
    except PolicyError as error:
        raise PolicyError(f"policy {text!r}: {error}") from error


def describe(name: str) -> str:
    """The first line of the rule's docstring.

    Raises:
        PolicyError: no such rule.

    """
    return (_load(name).__doc__ or name).strip().splitlines()[0]


def options(name: str) -> dict[str, str]:
    """The rule's options and what each holds by default, as text; "" where the rule chooses by the engine.

    Raises:
        PolicyError: no such rule.

    """
    return {field.name: _default(field) for field in _fields(_load(name).Config)}


def _fields(config_class: type[Any]) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(config_class) if field.init]


def _default(field: dataclasses.Field[Any]) -> str:
    value = None if field.default is dataclasses.MISSING else field.default
    return "" if value is None else str(value)


def _load(name: str) -> type[Any]:
    if name not in _RULES:
        raise PolicyError(f"unknown policy {name!r}: the policies are {', '.join(_RULES)}")
    module, _, class_name = _RULES[name].partition(":")
    rule: type[Any] = getattr(importlib.import_module(module), class_name)
    return rule


def _config(config_class: type[Any], arguments: tuple[str, ...], files: bool) -> Any:
    if hasattr(config_class, "from_arguments"):
        return config_class.from_arguments(arguments)
    names = [field.name for field in _fields(config_class)]
    hints = typing.get_type_hints(config_class)
    values = {name: _value(name, hints[name], text) for name, text in _named(names, arguments).items()}
    if not files:
        _refuse_files(config_class, values)
    return config_class(**values)


def _refuse_files(config_class: type[Any], values: dict[str, Any]) -> None:
    """Refuse what may name a file."""
    bundled = config_class.bundled() if hasattr(config_class, "bundled") else ()
    for name, value in values.items():
        if isinstance(value, str) and value not in bundled:
            raise PolicyError(
                f"{name} may name a file, and none is opened for a request: start the sidecar with it"
            )


def _named(names: list[str], arguments: tuple[str, ...]) -> dict[str, str]:
    """The arguments' texts by option name."""
    allowed = f"its options are {', '.join(names)}" if names else "it has no options"
    named: dict[str, str] = {}
    for position, argument in enumerate(arguments):
        name, equals, text = (part.strip() for part in argument.partition("="))
        if not equals:
            if position >= len(names):
                raise PolicyError(f"there are too many values, from {argument!r} on: {allowed}")
            if len(named) < position or list(named) != names[:position]:
                raise PolicyError(
                    f"the value {argument!r} needs a name here, as in {names[position]}={argument}"
                )
            name, text = names[position], argument
        if name not in names:
            raise PolicyError(f"there is no option {name!r}: {allowed}")
        if name in named:
            raise PolicyError(f"the option {name!r} is given twice")
        named[name] = text
    return named


def _value(name: str, hint: Any, text: str) -> Any:
    kind = _kind(hint)
    try:
        if kind is bool:
            return _BOOLEANS[text.lower()]
        value = kind(text)
    except (KeyError, ValueError):
        value = None
    if value is None or (kind is float and not math.isfinite(value)):
        raise PolicyError(f"{name} must be {_EXPECTED[kind]}, not {text!r}")
    return value


def _kind(hint: Any) -> type[Any]:
    """The type itself of ``int``, ``float | None`` and the like."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(argument for argument in typing.get_args(hint) if argument is not type(None))
    if hint not in _EXPECTED:
        raise TypeError(f"a Config field of type {hint} cannot be read from a text: give it a from_arguments")
    kind: type[Any] = hint
    return kind
