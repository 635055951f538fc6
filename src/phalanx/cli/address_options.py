"""Addresses on the command line: a host by name or IP address, alone or with a port."""

from __future__ import annotations

import click

from phalanx.run.peers import AddressError, read_address, read_host

_EVERY_INTERFACE = ("0.0.0.0", "::")


class HostName(click.ParamType[str]):
    """An address of this machine: one to listen at, or the one ``for_others`` to connect to."""

    name = "host"

    def __init__(self, *, for_others: bool = False) -> None:
        self._for_others = for_others

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the host without brackets; fail for one that has another form, or that this command cannot use."""
        try:
            host = read_host(str(value))
        except AddressError as error:
            has_port = ctx is not None and any(option.name == "port" for option in ctx.command.params)
            self.fail(f"{error}{', which --port sets' if has_port else ''}", param, ctx)
        if self._for_others:
            # A name that only the others know is right here, an address that each resolves to itself is not.
            if host in _EVERY_INTERFACE:
                self.fail(
                    f"{host} means every interface, and others connect to one: give its address", param, ctx
                )
        elif not _is_known(host):
            self.fail(f"no address is known for {host}: give an address of this machine", param, ctx)
        return host


class HostAndPort(click.ParamType[str]):
    """An address of another process; empty if none is given."""

    name = "host:port"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return "host:port", with brackets around an IPv6 address; fail for another form."""
        if not value:
            return ""
        from phalanx.hardware.local.network import join_address

        try:
            return join_address(*read_address(str(value)))
        except AddressError as error:
            self.fail(str(error), param, ctx)


def _is_known(host: str) -> bool:
    from phalanx.hardware.local.network import resolved

    return bool(resolved(host))
