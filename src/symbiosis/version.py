"""The version, in the one place that the build reads, without importing the package."""

VERSION = "0.1.0"
