"""tools/bench.py: what it runs, what it checks, what it compares."""

import json
import sys

import numpy as np
import pytest

from tests import oracle_model
from tools import bench
