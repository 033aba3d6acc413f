"""The Open Inference Protocol over gRPC. Clients in other languages can be generated from `inference.proto`."""
