# Aliases only: ./run is the tool, and `./run --help` lists all it does.
.PHONY: demo test lint types

demo:
	./run quickstart

test:
	./run test

lint:
	./run lint

types:
	./run types
