# Where type checkers and editors find kimijax.serve; not shipped. See docs/architecture.md, "Imports".
from serve import *
from serve import answer as answer
from serve import app as app
from serve import check as check
from serve import config as config
from serve import errors as errors
from serve import formats as formats
from serve import hosts as hosts
from serve import logprobs as logprobs
from serve import openai_schema as openai_schema
from serve import prepare as prepare
from serve import responses as responses
from serve import service as service
from serve import shutdown as shutdown
from serve import speculation_flags as speculation_flags
from serve import startup as startup
from serve import status_log as status_log
