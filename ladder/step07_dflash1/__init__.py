"""placeholder"""
from .attention import *
