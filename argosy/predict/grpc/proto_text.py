"""Reads a .proto file and builds its message classes, without a compiler or generated code.

It supports the part of proto3 that the files in this folder use: messages and enums (also nested), `repeated`, `map`, `oneof` and
services. It does not support imports, options, comments in /* */ or reserved numbers. Every file gets a descriptor pool of its own, so
that a process may also have generated classes of the same protocol.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

TOKEN = re.compile(r'"[^"]*"|[\w.]+|[{}=;<>,()]')
Field = descriptor_pb2.FieldDescriptorProto
SCALARS = {
    name: getattr(Field, f"TYPE_{name.upper()}")
    for name in ("bool", "int32", "int64", "uint32", "uint64", "float", "double", "string", "bytes")
}


@dataclass(frozen=True)
class ProtoMethod:
    """A method of a service.

    request, response: the message classes.
    client_streams, server_streams: whether the client and the server send a stream.
    """

    request: Any
    response: Any
    client_streams: bool
    server_streams: bool


@dataclass(frozen=True)
class ProtoFile:
    """The contents of a .proto file.

    messages: the message classes by name, nested ones as `Outer.Inner`.
    service: the full name of the service.
    methods: the methods of the service by name.
    """

    messages: Mapping[str, Any]
    service: str
    methods: Mapping[str, ProtoMethod]


def read_proto(path: Path) -> ProtoFile:
    """Reads a file and builds the classes of its messages."""
    descriptor = _Parser(path.read_text(encoding="utf-8"), path.name).file()
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(descriptor.SerializeToString())
    file = pool.FindFileByName(path.name)
    messages: dict[str, Any] = {}

    def add(prefix: str, types: Mapping[str, Any]) -> None:
        for name, message_type in types.items():
            messages[prefix + name] = message_factory.GetMessageClass(message_type)
            add(f"{prefix}{name}.", message_type.nested_types_by_name)

    add("", file.message_types_by_name)
    (service,) = file.services_by_name.values()
    methods = {}
    for method in descriptor.service[0].method:
        request, response = (messages[kind.rpartition(".")[2]] for kind in (method.input_type, method.output_type))
        methods[method.name] = ProtoMethod(request, response, method.client_streaming, method.server_streaming)
    return ProtoFile(messages, service.full_name, methods)


class _Parser:
    """Converts tokens to descriptors, by recursive descent."""

    def __init__(self, text: str, name: str):
        self.tokens = TOKEN.findall(re.sub(r"//.*", "", text))
        self.at = 0
        self.descriptor = descriptor_pb2.FileDescriptorProto(name=name, syntax="proto3")

    def next(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1]

    def skip(self, *expected: str) -> None:
        """Consumes the next tokens, which must be the expected ones."""
        if (tokens := self.tokens[self.at : self.at + len(expected)]) != list(expected):
            raise ValueError(f"{self.descriptor.name}: {' '.join(tokens)} in place of {' '.join(expected)}")
        self.at += len(expected)

    def is_next(self, token: str) -> bool:
        """Consumes the next token if it is this one, and returns whether it was."""
        if self.tokens[self.at] == token:
            self.at += 1
            return True
        return False

    def file(self) -> descriptor_pb2.FileDescriptorProto:
        while self.at < len(self.tokens):
            match self.next():
                case "syntax":
                    self.skip("=", '"proto3"', ";")
                case "package":
                    self.descriptor.package = self.next()
                    self.skip(";")
                case "message":
                    self.message(self.descriptor.message_type.add())
                case "enum":
                    self.enum(self.descriptor.enum_type.add())
                case "service":
                    self.service(self.descriptor.service.add())
                case other:
                    raise ValueError(f"{self.descriptor.name}: unexpected {other}")
        return self.descriptor

    def message(self, message: Any) -> None:
        message.name = self.next()
        self.skip("{")
        while not self.is_next("}"):
            if self.is_next("message"):
                self.message(message.nested_type.add())
            elif self.is_next("enum"):
                self.enum(message.enum_type.add())
            elif self.is_next("oneof"):
                message.oneof_decl.add(name=self.next())
                self.skip("{")
                while not self.is_next("}"):
                    self.field(message, oneof=len(message.oneof_decl) - 1)
            else:
                self.field(message)

    def field(self, message: Any, oneof: int | None = None) -> None:
        repeated = self.is_next("repeated")
        kind, entry = self.next(), []
        if kind == "map":
            self.skip("<")
            entry = [self.next()]
            self.skip(",")
            entry += [self.next()]
            self.skip(">")
        name = self.next()
        self.skip("=")
        number = int(self.next())
        self.skip(";")
        if entry:
            # A map is a list of messages with a key and a value.
            kind = f"{''.join(part.capitalize() for part in name.split('_'))}Entry"
            nested = message.nested_type.add(name=kind)
            nested.options.map_entry = True
            for i, part in enumerate(entry):
                self.typed(nested.field.add(name=("key", "value")[i], number=i + 1, label=Field.LABEL_OPTIONAL), part)
        label = Field.LABEL_REPEATED if repeated or entry else Field.LABEL_OPTIONAL
        field = message.field.add(name=name, number=number, label=label)
        if oneof is not None:
            field.oneof_index = oneof
        self.typed(field, kind)

    def typed(self, field: Any, kind: str) -> None:
        """Sets the type of a field. The descriptor pool later finds out whether a name is that of a message or an enum."""
        if kind in SCALARS:
            field.type = SCALARS[kind]
        else:
            field.type_name = kind

    def enum(self, enum: Any) -> None:
        enum.name = self.next()
        self.skip("{")
        while not self.is_next("}"):
            name = self.next()
            self.skip("=")
            enum.value.add(name=name, number=int(self.next()))
            self.skip(";")

    def service(self, service: Any) -> None:
        service.name = self.next()
        self.skip("{")
        while not self.is_next("}"):
            self.skip("rpc")
            method = service.method.add(name=self.next())
            self.skip("(")
            method.client_streaming = self.is_next("stream")
            method.input_type = self.next()
            self.skip(")", "returns", "(")
            method.server_streaming = self.is_next("stream")
            method.output_type = self.next()
            self.skip(")", ";")
