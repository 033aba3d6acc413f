"""The Open Inference Protocol over gRPC. `inference.proto` is also what clients in other languages are made from."""
