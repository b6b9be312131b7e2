"""The other releases' stand-in for SGLang's CPU kernel library, and what 0.5.9 wants beside it."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path

__version__ = "0.0.0+stub"
_COMMON = Path(__file__).parents[3] / "shim" / "sgl_kernel" / "__init__.py"
_spec = importlib.util.spec_from_file_location("sgl_kernel_common", _COMMON)
_common = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_common)


def verify_tree_greedy(**arguments):
    _common.verify_tree_greedy_cpu(**arguments)


def build_tree_kernel_efficient(*arguments):
    _common.build_tree_kernel_efficient_cpu(*arguments)


def _unusable(name):
    def function(*_, **__):
        raise NotImplementedError(f"sgl_kernel's stand-in has no {name}")

    return function


class _Module(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _unusable(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """0.5.9 imports this submodule on a CPU too, and does not use it there."""

    def find_spec(self, name, path=None, target=None):
        if name == "sgl_kernel.kvcacheio":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_common, name, None) or _unusable(name)
