"""One module per kernel family. Importing this package registers all of them."""

from jitfp4.families import attention as attention
from jitfp4.families import gdn as gdn
from jitfp4.families import norm as norm
from jitfp4.families import quantize as quantize
