"""Parameters that are tensor subclasses: of several tensors, or with an all-gather of their own."""

from .class_codecs import CompositeCodec as CompositeCodec
from .class_codecs import ExtensionCodec as ExtensionCodec
from .class_codecs import check_composite as check_composite
from .class_codecs import codec_of_class as codec_of_class
from .class_codecs import cut as cut
from .parts import common_tensor as common_tensor
from .parts import context_of as context_of
from .parts import describe_part as describe_part
from .parts import inner_tensors as inner_tensors
from .parts import remade as remade
from .subclass_views import CompositeDTensor as CompositeDTensor
from .subclass_views import with_local as with_local
from .unsharded_extension import ExtendedUnsharded as ExtendedUnsharded
