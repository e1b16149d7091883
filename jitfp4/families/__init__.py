"""One module per kernel family. Importing this package registers all of them.

A program that torch.export saved names their operators. jitfp4.registration has them registered when torch is imported.
"""

from jitfp4.families import attention as attention
from jitfp4.families import conv as conv
from jitfp4.families import experts as experts
from jitfp4.families import gdn as gdn
from jitfp4.families import gemm as gemm
from jitfp4.families import kv as kv
from jitfp4.families import norm as norm
from jitfp4.families import quantize as quantize
from jitfp4.families import step as step
