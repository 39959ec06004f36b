"""`python -m benchmarks.http_load`."""

from benchmarks.http_load.benchmark import main

if __name__ == "__main__":
    main()
