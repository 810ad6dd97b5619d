"""Put conf/ inside the built package; an editable install reads the checkout's own and must hold no copy."""

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ConfHook(BuildHookInterface):
    """Maps conf/ to trainer/conf/ in a wheel that is not editable."""

    def initialize(self, version: str, build_data: dict) -> None:
        """`version` is "editable" for an editable install, else "standard"."""
        if version != "editable":
            build_data["force_include"]["conf"] = "trainer/conf"
