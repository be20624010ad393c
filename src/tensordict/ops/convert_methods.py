"""Every conversion as a method."""

from __future__ import annotations

from .convert import ConvertMethods
from .convert_arrays import ArrayMethods
from .convert_python import PythonMethods
from .convert_schema import SchemaMethods
from .convert_tables import TableMethods


class ConversionMethods(ConvertMethods, PythonMethods, ArrayMethods, SchemaMethods, TableMethods):
    """Conversion from and to other containers, arrays, tables and schemas."""

    __slots__ = ()
