"""The wire protocol: .proto files and the Python code generated from them (``make proto``)."""
