"""On PYTHONPATH, this starts the stand-in for a CUDA device in every Python."""

import os

from tests.support import standin

os.environ[standin.LIBRARY] = str(standin.build())
standin.DEVICE = standin.start()
