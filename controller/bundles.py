"""Policy bundles of a running sidecar: its store, the bundles in use, and the one that is watched.

The store is a folder on the sidecar's machine, ``bundles.dir``: ``NAME/VERSION/`` holds a bundle, versions
count from 1 and never change. Who may write there may push; over the wire bundles are only named, and a name
cannot lead out of the store. The policy text of a stored bundle is ``ppo:NAME@VERSION``.

Where the configured policy is ``ppo:FOLDER``, that folder is looked at every ``bundles.watch_s`` seconds.
What has changed there and can be used is tried by every engine whose policy it is, between two of its steps;
what cannot be used, half-written files included, leaves the bundle in use as it is, with one message.

Bundles are read by admin calls and the watching thread, never by an engine's stream: those that are in use
are kept in memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specgov.controller.config import ServeConfig
from specgov.controller.logs import get_logger
from specgov.controller.state_file import sync_folder
from specgov.policies.bundle import (
    CARD_FILE,
    README_FILE,
    WEIGHTS_FILE,
    Bundle,
    BundleError,
    bundle_names,
    load_bundle,
)
from specgov.policies.registry import parse_policy
from specgov.policies.types import PolicyError

if TYPE_CHECKING:
    from specgov.controller.engine import Engine

MAX_KEPT = 64
LEFT_OVER_S = 3600.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_STORED = re.compile(rf"ppo:(?:bundle=)?({_NAME.pattern})@([1-9][0-9]{{0,8}})")
_REFERENCE = re.compile(rf"({_NAME.pattern})@([1-9][0-9]{{0,8}})")


@dataclass(frozen=True, slots=True)
class StoredBundle:
    """A bundle in a store; ``problem`` says why it cannot be used, and is empty where it can."""

    name: str
    version: int
    weights_sha256: str
    problem: str

    @property
    def policy_text(self) -> str:
        """The policy that it is."""
        return policy_text(self.name, self.version)


def policy_text(name: str, version: int) -> str:
    """The policy of a stored bundle."""
    return f"ppo:{name}@{version}"


class Bundles:
    """What a sidecar knows of bundles; may be used from any thread."""

    def __init__(self, config: ServeConfig) -> None:
        self.folder = None if config.bundles.dir is None else Path(config.bundles.dir).absolute()
        self._lock = threading.Lock()
        self._loaded: dict[str, Bundle] = {}

    def is_stored(self, text: str) -> bool:
        """Whether a policy text names a bundle of the store, there or not."""
        return self.folder is not None and _STORED.fullmatch(text) is not None

    def load(self, reference: str) -> Bundle:
        """The bundle of a policy's option: ``NAME@VERSION`` in the store, else as ``load_bundle`` has it.

        Raises:
            BundleError: there is none, or it cannot be used.

        """
        with self._lock:
            known = self._loaded.pop(reference, None)
            if known is not None:
                self._loaded[reference] = known  # the last to be let go
        return known or self.reload(reference)

    def reload(self, reference: str) -> Bundle:
        """As ``load``, from the disk in any case; after an error the bundle in memory stays.

        Raises:
            BundleError: there is none, or it cannot be used.

        """
        stored = _REFERENCE.fullmatch(reference)
        if stored and self.folder is not None:
            bundle = load_stored(self.folder, stored[1], int(stored[2]))
        else:
            bundle = load_bundle(reference)
        with self._lock:
            self._loaded.pop(reference, None)
            self._loaded[reference] = bundle
            while len(self._loaded) > MAX_KEPT:
                del self._loaded[next(iter(self._loaded))]
        return bundle

    def make_folder(self) -> None:
        """Make the store's folder, if there is to be one.

        Raises:
            BundleError: it cannot be made.

        """
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BundleError(
                f"{self.folder}: no store can be here: {error.strerror}; name another with bundles.dir"
            ) from error

    def stored(self) -> list[StoredBundle]:
        """The store's bundles by name and version."""
        return [] if self.folder is None else stored_bundles(self.folder)

    def newest(self, name: str) -> int:
        """The newest version of a stored bundle.

        Raises:
            BundleError: there is none of that name.

        """
        versions = [] if self.folder is None or not _NAME.fullmatch(name) else _versions(self.folder / name)
        if not versions:
            raise BundleError(f"there is no bundle {name!r} in the store: push it first")
        return versions[-1]


def load_stored(store: Path, name: str, version: int) -> Bundle:
    """A bundle of a store.

    Raises:
        BundleError: there is none, or it cannot be used.

    """
    folder = store / name / str(version)
    if not _NAME.fullmatch(name) or not folder.is_dir():
        raise BundleError(f"there is no bundle {name}@{version} in the store: see specgov policy list")
    return load_bundle(folder)


def stored_bundles(store: Path) -> list[StoredBundle]:
    """A store's bundles by name and version, each read and checked."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        names = sorted(path.name for path in store.iterdir() if _NAME.fullmatch(path.name))
        for name in names:
            for version in _versions(store / name):
                digest, problem = "", ""
                try:
                    digest = load_stored(store, name, version).card.weights_sha256
                except BundleError as error:
                    problem = str(error)
                found.append(StoredBundle(name, version, digest, problem))
    return found


def push(source: Path, store: Path, name: str | None = None) -> StoredBundle:
    """Check the bundle in the folder ``source`` and copy it into a store as its name's next version.

    The copy is checked again, brought to the disk and renamed into place: a reader sees all of it or nothing.

    Raises:
        BundleError: it cannot be used, or has no name that a store can have.
        OSError: the store cannot be written.

    """
    name = load_bundle(source).card.name if name is None else name
    if not _NAME.fullmatch(name):
        raise BundleError(
            f"{name!r} is no name for a store (letters, digits, - and _, 64 at most): name it with --name"
        )
    parent = store / name
    parent.mkdir(parents=True, exist_ok=True)
    _clear_left_over(parent)
    staging = Path(tempfile.mkdtemp(prefix=".push-", dir=parent))
    try:
        staging.chmod(0o755)
        for file in (WEIGHTS_FILE, CARD_FILE, README_FILE):
            if file != README_FILE or (source / file).is_file():
                _copy(source / file, staging / file)
        digest = load_bundle(staging).card.weights_sha256
        sync_folder(staging)
        version = (_versions(parent) or [0])[-1] + 1
        while not _renamed(staging, parent / str(version)):
            version += 1
        sync_folder(parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return StoredBundle(name, version, digest, "")


class BundleWatcher:
    """Looks at the folder of the configured policy now and then.

    Args:
        config: its policy is the one that is watched, if it is a bundle's folder.
        bundles: where the bundle in use is kept.
        engines: all engines that the sidecar knows.

    """

    def __init__(self, config: ServeConfig, bundles: Bundles, engines: Callable[[], list[Engine]]) -> None:
        self._config, self._bundles, self._engines = config, bundles, engines
        self._reference = watched_folder(config)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="specgov-bundles", daemon=True)
        self._seen: object = None

    def start(self) -> None:
        """Make the store's folder; read the configured policy's bundle, and watch it from now on.

        Raises:
            BundleError: the bundle cannot be used, or the folder not made.

        """
        self._bundles.make_folder()
        if self._reference is not None:
            self._seen = _stamp(Path(self._reference))
            self._bundles.reload(self._reference)
            self._thread.start()

    def close(self) -> None:
        """Watch no more."""
        self._stop.set()

    def look(self) -> None:
        """Let the engines try what has changed in the folder since the last look."""
        if self._reference is None:
            return
        stamp = _stamp(Path(self._reference))
        if stamp == self._seen:
            return
        self._seen = stamp
        before = self._bundles.load(self._reference).card.weights_sha256
        try:
            bundle = self._bundles.reload(self._reference)
        except BundleError as error:
            get_logger().error("changed bundle cannot be used; the one before stays", problem=str(error))
            return
        if bundle.card.weights_sha256 == before:
            return
        get_logger().info("bundle changed", folder=self._reference, weights_sha256=bundle.card.weights_sha256)
        for engine in self._engines():
            if engine.policy_text == self._config.policy:
                try:
                    engine.try_policy(self._config.policy)
                except (PolicyError, ValueError) as error:
                    get_logger().error(
                        "changed bundle cannot be used by an engine; the one before stays",
                        engine_id=engine.info.engine_id,
                        problem=str(error),
                    )

    def _run(self) -> None:
        while not self._stop.wait(self._config.bundles.watch_s):
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - a fault of ours here must not end the watch
                get_logger().error("bundles cannot be watched", exc_info=error)


def watched_folder(config: ServeConfig) -> str | None:
    """The folder whose bundle is the configured policy, None where it is something else."""
    rule, options = parse_policy(config.policy)
    reference = getattr(options, "bundle", None)
    if rule.name != "ppo" or reference in bundle_names() or (reference and _REFERENCE.fullmatch(reference)):
        return None
    return str(reference)


def _clear_left_over(parent: Path) -> None:
    """Remove what a push that was killed left, long ago so that none under way is meant."""
    for path in parent.glob(".push-*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - LEFT_OVER_S:
                shutil.rmtree(path)


def _stamp(folder: Path) -> object:
    """Another one whenever the bundle's files have been written."""
    found = []
    for file in (WEIGHTS_FILE, CARD_FILE):
        with contextlib.suppress(OSError):
            status = (folder / file).stat()
            found.append((file, status.st_ino, status.st_size, status.st_mtime_ns))
    return found


def _versions(folder: Path) -> list[int]:
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return []
    return sorted(int(name) for name in names if re.fullmatch(r"[1-9][0-9]{0,8}", name))


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as there, target.open("wb") as here:
        shutil.copyfileobj(there, here)
        here.flush()
        os.fsync(here.fileno())


def _renamed(staging: Path, target: Path) -> bool:
    """Rename a folder; False where the name is taken by now."""
    if target.exists():
        return False
    try:
        staging.rename(target)
    except OSError:
        if target.exists():
            return False
        raise
    return True
