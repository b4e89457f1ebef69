"""Models that this project trains itself. Not part of the package."""
