"""The simulated server: acceptance, arrivals, batching; as an emulated engine and as gymnasium environments.

Importing this registers the gymnasium environment ``specgov/Serving-v0`` where gymnasium is installed. The
modules of the environments, and with them everything heavy, load when one is made.
"""

from importlib.util import find_spec

if find_spec("gymnasium") is not None:
    from gymnasium import register

    register(
        id="specgov/Serving-v0",
        entry_point="specgov.env.serving:ServingEnv",
        vector_entry_point="specgov.env.vector:ServingVectorEnv",
    )
