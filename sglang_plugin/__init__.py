"""What runs inside SGLang's processes. Needs numpy, grpcio and protobuf only."""
