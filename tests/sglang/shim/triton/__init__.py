"""Stand-in for triton, for tests: SGLang imports it everywhere, and on a CPU runs no kernel of it."""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "3.9.0"


class _Kernel:
    """What ``triton.jit`` returns; it can be defined and passed around, not launched."""

    def __init__(self, function):
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"the Triton kernel {self.__name__} was launched on a CPU")


def jit(function=None, **kwargs):
    return _Kernel if function is None else _Kernel(function)


def autotune(*args, **kwargs):
    return lambda function: function


heuristics = autotune


def cdiv(a, b):
    return -(-a // b)


def next_power_of_2(n):
    return 1 << max(0, int(n) - 1).bit_length()


class Config:
    def __init__(self, kwargs=None, **options):
        self.kwargs = kwargs or {}


class _AnyMeta(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Any


class _Any(metaclass=_AnyMeta):
    """Whatever is asked of it is there and does nothing; as a decorator it leaves the function as it is."""

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        decorates = len(args) == 1 and callable(args[0]) and not kwargs
        return args[0] if decorates else _Any()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Any()

    def __class_getitem__(cls, item):
        return cls

    def __getitem__(self, item):
        return self


class _Driver:
    @property
    def active(self):
        raise RuntimeError("0 active drivers ([]). There should only be one.")


_REAL = {"jit": jit, "cdiv": cdiv, "next_power_of_2": next_power_of_2}
_TYPES = ("constexpr", "dtype", "tensor", "pointer_type")


class _Submodule(types.ModuleType):
    """``triton.language`` and the like, made up as they are imported."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "driver":
            return _Driver()
        if name in _REAL:
            value = _REAL[name]
        elif name[0].isupper() or name in _TYPES:
            value = type(name, (_Any,), {"__module__": self.__name__})
        else:
            value = _Any()
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if not name.startswith("triton."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Submodule(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Finder())


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return importlib.import_module("triton." + name)
