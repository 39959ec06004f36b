from symbiosis.common.available_memory import available_memory


def test_memory_is_available() -> None:
    assert 1 << 20 < available_memory() < 1 << 50
