"""Protocol version 1: ``specgov_pb2`` (messages) and ``specgov_pb2_grpc`` (services)."""
