from setuptools import setup

from aotops.setuptools import kernels

setup(**kernels())
