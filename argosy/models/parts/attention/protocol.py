"""Protocols whose `isinstance` check runs no property of the instance."""

from inspect import getattr_static
from typing import Any, Protocol

_ProtocolType: Any = type(Protocol)


class StaticProtocol(_ProtocolType):
    """The metaclass of such protocols. It looks attributes up statically, as Python 3.12 does for all protocols
    (python/cpython#102433). Python 3.11 gets each attribute, which would run properties that compute arrays."""

    def __instancecheck__(self, instance: object) -> bool:
        if not self._is_protocol:
            return super().__instancecheck__(instance)
        interfaces = [base for base in self.__mro__ if isinstance(base, StaticProtocol)]
        names = {name for base in interfaces for name in vars(base) if name == "__call__" or not name.startswith("_")}
        missing = object()
        return all(getattr_static(instance, name, missing) is not missing for name in names)
