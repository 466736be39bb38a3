"""The gRPC part of the API reference, from the .proto files and their comments."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

from tools.api_reference.markdown import code, heading, link, table

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ".baton.v1."
PUBLIC_SERVICES = ("Generation", "Cluster")  # other services are internal to Baton
# Field numbers of descriptor.proto, which make up the path of a definition in a file.
_MESSAGE, _ENUM, _SERVICE, _MEMBER = 4, 5, 6, 2

Field = FieldDescriptorProto
Comments = dict[tuple[int, ...], str]


class ProtoDefinitions:
    """Definitions of the files by name, with the comments and the path of each."""

    def __init__(self, files: FileDescriptorSet) -> None:
        self.messages: dict[str, tuple[DescriptorProto, Comments, tuple[int, ...]]] = {}
        self.enums: dict[str, tuple[EnumDescriptorProto, Comments, tuple[int, ...]]] = {}
        self.services: dict[str, tuple[ServiceDescriptorProto, Comments, tuple[int, ...]]] = {}
        for file in files.file:
            comments = _comments(file)
            for index, message in enumerate(file.message_type):
                self.messages[message.name] = message, comments, (_MESSAGE, index)
            for index, enum in enumerate(file.enum_type):
                self.enums[enum.name] = enum, comments, (_ENUM, index)
            for index, service in enumerate(file.service):
                self.services[service.name] = service, comments, (_SERVICE, index)


def render_grpc_section() -> list[str]:
    words = ProtoDefinitions(load_descriptors())
    lines: list[str] = []
    named: list[str] = []
    for name in PUBLIC_SERVICES:
        service, comments, place = words.services[name]
        lines += heading(3, f"service {name}")
        lines += [comments.get(place, ""), ""]
        rows = []
        for index, method in enumerate(service.method):
            takes, gives = _simple_name(method.input_type), _simple_name(method.output_type)
            stream = "stream of " if method.server_streaming else ""
            rows.append(
                (
                    code(method.name),
                    link("message", takes),
                    stream + link("message", gives),
                    comments.get((*place, _MEMBER, index), ""),
                )
            )
            named += [takes, gives]
        lines += table(("call", "takes", "gives", "what it does"), rows)
    lines += heading(3, "Messages")
    for name in _reachable_types(words, named):
        lines += _message_lines(words, name) if name in words.messages else _enum_lines(words, name)
    return lines


def _message_lines(words: ProtoDefinitions, name: str) -> list[str]:
    message, comments, place = words.messages[name]
    lines = heading(4, f"message {name}")
    if place in comments:
        lines += [comments[place], ""]
    if not message.field:
        return [*lines, "No fields.", ""]
    rows = [
        (
            code(field.name),
            str(field.number),
            _field_type_text(message, field),
            comments.get((*place, _MEMBER, index), ""),
        )
        for index, field in enumerate(message.field)
    ]
    return lines + table(("field", "number", "type", "what it is"), rows)


def _enum_lines(words: ProtoDefinitions, name: str) -> list[str]:
    enum, comments, place = words.enums[name]
    rows = [
        (code(value.name), str(value.number), comments.get((*place, _MEMBER, index), ""))
        for index, value in enumerate(enum.value)
    ]
    return heading(4, f"message {name}") + table(("value", "number", "what it is"), rows)


def _field_type_text(message: DescriptorProto, field: Field) -> str:
    entry = next(
        (nested for nested in message.nested_type if field.type_name.endswith("." + nested.name)),
        None,
    )
    if entry is not None and entry.options.map_entry:
        return f"map of {_type_text(entry.field[0])} to {_type_text(entry.field[1])}"
    kind = _type_text(field)
    if field.label == Field.LABEL_REPEATED:
        return f"list of {kind}"
    if field.proto3_optional:
        return f"optional {kind}"
    if field.HasField("oneof_index"):
        return f"one of {message.oneof_decl[field.oneof_index].name}: {kind}"
    return kind


def _type_text(field: Field) -> str:
    return (
        link("message", _simple_name(field.type_name))
        if field.type_name
        else Field.Type.Name(field.type)[5:].lower()
    )


def _reachable_types(words: ProtoDefinitions, named: list[str]) -> Iterator[str]:
    """Return messages and enums in the order in which a reader meets them."""
    visited: set[str] = set()
    while named:
        name, *named = named
        if name in visited:
            continue
        visited.add(name)
        yield name
        if name in words.messages:
            field_types = _field_type_names(words.messages[name][0])
            named = [*field_types, *named]


def _field_type_names(message: DescriptorProto) -> list[str]:
    """Return the type names of the fields, and of the values of map fields."""
    nested = {nested_type.name for nested_type in message.nested_type}
    fields = [
        *message.field,
        *(field for nested_type in message.nested_type for field in nested_type.field),
    ]
    return [
        kind
        for field in fields
        if field.type_name and (kind := _simple_name(field.type_name)) not in nested
    ]


def _simple_name(name: str) -> str:
    return name.rpartition(".")[2]


def _comments(file: FileDescriptorProto) -> Comments:
    comments: Comments = {}
    for location in file.source_code_info.location:
        text = " ".join((location.leading_comments + location.trailing_comments).split())
        if text:
            comments[tuple(location.path)] = text
    return comments


def load_descriptors() -> FileDescriptorSet:
    """Return the files as protoc parses them, with comments. Raises SystemExit on an error."""
    names = [f"baton/pb/{path.name}" for path in sorted((ROOT / "proto").glob("*.proto"))]
    with tempfile.NamedTemporaryFile() as out:
        options = [
            f"-Ibaton/pb={ROOT / 'proto'}",
            "--include_source_info",
            f"--descriptor_set_out={out.name}",
        ]
        if protoc.main(["protoc", *options, *names]) != 0:
            sys.exit("protoc failed")
        return FileDescriptorSet.FromString(out.read())
