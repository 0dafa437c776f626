"""Compiled programs are kept on disk for whoever trains, by command line or as a library."""

import jax
import pytest

from swift.mesh.devices import enable_compilation_cache


@pytest.fixture
def config():
    """JAX's configuration, given back as it was."""
    names = ("dir", "max_size")
    before = {f"jax_compilation_cache_{name}": getattr(jax.config, f"jax_compilation_cache_{name}") for name in names}
    least_s = "jax_persistent_cache_min_compile_time_secs"
    before[least_s] = getattr(jax.config, least_s)
    yield jax.config
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_kept_where_only_their_owner_can_write(config, tmp_path, monkeypatch):
    config.update("jax_compilation_cache_dir", None)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    enable_compilation_cache()
    directory = tmp_path / ".cache" / "swift" / "programs"
    assert config.jax_compilation_cache_dir == str(directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert config.jax_persistent_cache_min_compile_time_secs < 1.0


def test_a_directory_that_was_chosen_stays(config, tmp_path):
    config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    enable_compilation_cache()
    assert config.jax_compilation_cache_dir == str(tmp_path / "mine")
    assert not (tmp_path / "mine").exists()
