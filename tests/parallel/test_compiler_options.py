"""Options for compilers: known ones are taken, unknown ones are named, and nothing fails for them."""

import jax
import jax.numpy as jnp
import pytest

from argosy.parallel.compiler_options import OPTIONS, compile_lowered
from argosy.parallel.target import Target
from argosy.run.assembly.assemble import assemble
from argosy.run.assembly.decided import Decided
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run


def test_an_unknown_option_is_named_and_left_out():
    lowered, messages = jax.jit(lambda x: x + 1).lower(jnp.zeros(3)), list[str]()
    program = compile_lowered(lowered, {"xla_tpu_no_such_option": "true"}, messages.append)
    assert program(jnp.zeros(3)).tolist() == [1, 1, 1]
    assert "xla_tpu_no_such_option" in messages[0]


def test_other_failures_are_not_swallowed():
    class Fails:
        def compile(self, compiler_options=None):
            raise RuntimeError("RESOURCE_EXHAUSTED")

    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        compile_lowered(Fails(), {"a": "b"})


def test_only_tpus_have_options_and_a_setting_turns_them_off():
    for device, words, options in (
        ("this", [], {}),
        ("v5p-8", [], OPTIONS["tpu"]),
        ("v5p-8", ["execution.compiler_options=none"], {}),
    ):
        run = compose(Run, "tiny", words).value
        target = Target.described(device)
        assert assemble(run, Decided.here(run, target), target=target, reads=False).compiler_options == options


@pytest.mark.tpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_the_compiler_of_tpus_knows_all_options(topology):
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    sharding = jax.sharding.SingleDeviceSharding(devices[0])
    lowered = jax.jit(lambda x: x @ x, in_shardings=sharding).lower(jax.ShapeDtypeStruct((128, 128), jnp.float32))
    messages = list[str]()
    compile_lowered(lowered, OPTIONS["tpu"], messages.append)
    assert messages == []
