"""Stand-in for torchvision, for tests: SGLang and transformers import it, and text models never use it."""

import enum
import importlib
import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.0.0"


class _Any:
    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        raise NotImplementedError("this torchvision is a stand-in")

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__()


class _Submodule(types.ModuleType):
    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "InterpolationMode":
            value = enum.Enum(name, "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS")
        elif name[0].isupper():
            value = type(name, (_Any,), {"__module__": self.__name__})
        else:
            value = _Any()
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if not name.startswith("torchvision."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Submodule(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return importlib.import_module("torchvision." + name)
