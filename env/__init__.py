"""The simulated server: acceptance, arrivals, batching; as an emulated engine and as gymnasium environments."""
