"""This host's address, name and ports, and what environment variables say of them."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping

from ..rendezvous import Rendezvous, interface_of
from .findings import Finding

ANYWHERE = Rendezvous(file="/")  # no host in particular: the way out
PATIENCE_S = 5.0
PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def address(meeting: Rendezvous = ANYWHERE) -> Finding:
    """By which address others reach this host, and on which interface it is."""
    found = meeting.address()
    device = interface_of(found) or ""
    facts = {"address": found, "interface": device or None}
    shown = f"{found} on {device}" if device else found
    if is_loopback(found):
        advice = "hosts elsewhere cannot reach this host by that address; "
        advice += (
            "this host has no route to a network"
            if meeting.file
            else f"name {meeting.host} by the address that they use"
        )
        return Finding("address", "note", shown, advice, facts)
    return Finding("address", "ok", shown, "", facts)


def hostname() -> Finding:
    """What the name of this host stands for: gloo's own choice of an address, where nothing else is
    said."""
    name = socket.gethostname()
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError:
        found = []
    return judge_hostname(name, found)


def judge_hostname(name: str, found: list[str]) -> Finding:
    """The name, and the addresses that it stands for."""
    facts = {"hostname": name, "addresses": found}
    advice = "weft tells gloo the interface where hosts meet, under torchrun and srun too"
    if not found:
        return Finding("hostname", "note", f"{name} resolves to no address", advice, facts)
    shown = f"{name} is {', '.join(found)}"
    if all(map(is_loopback, found)):
        return Finding("hostname", "note", f"{shown}, a loopback", advice, facts)
    return Finding("hostname", "ok", shown, "", facts)


def port(meeting: Rendezvous = ANYWHERE) -> Finding:
    """Whether a free port of this host can be opened, and reached by its own address."""
    found = meeting.address()
    with listening(found) as server:
        number = server.getsockname()[1]
        with socket.create_connection((found, number), PATIENCE_S):
            server.accept()[0].close()
    return Finding("port", "ok", f"a free port opens, and answers at {found}", "", {"port": number})


def listening(address: str) -> socket.socket:
    """A free port of this host, at this address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server((address, 0), family=family)
    server.settimeout(PATIENCE_S)
    return server


def variables() -> Finding:
    """The variables that choose interfaces, and those that have no say."""
    return judge_variables(os.environ, [name for _, name in socket.if_nameindex()])


def judge_variables(environment: Mapping[str, str], interfaces: Iterable[str]) -> Finding:
    """The environment of a process on a host that has these interfaces."""
    known = sorted(interfaces)
    chosen = {
        name: environment[f"{name}_SOCKET_IFNAME"]
        for name in ("GLOO", "NCCL")
        if environment.get(f"{name}_SOCKET_IFNAME")
    }
    missing = {name: text for name, text in chosen.items() if not _exists(name, text, known)}
    shown = [f"{name}_SOCKET_IFNAME={text}" for name, text in chosen.items()]
    proxies = [each for name in PROXIES for each in (name, name.upper()) if environment.get(each)]
    facts = {"chosen": chosen, "interfaces": known, "proxies": proxies}
    found = ", ".join(shown) or "no variable names an interface"
    if missing:
        name, text = next(iter(missing.items()))
        advice = (
            f"this host has no such interface: unset {name}_SOCKET_IFNAME, or name one of"
            f" {', '.join(known)}"
        )
        return Finding("variables", "wrong", f"{name}_SOCKET_IFNAME={text}", advice, facts)
    advice = f"{', '.join(proxies)}: weft sends nothing through a proxy" if proxies else ""
    return Finding("variables", "ok", found, advice, facts)


def _exists(library: str, text: str, known: list[str]) -> bool:
    """Whether a host with these interfaces has what the variable names. gloo takes names; NCCL
    takes beginnings of names, names after =, and names to leave out after ^."""
    if library == "GLOO":
        return all(name in known for name in text.split(","))
    exact, names = text.startswith("="), text.lstrip("^=").split(",")
    fits = [
        each
        for each in known
        if any(each == name if exact else each.startswith(name) for name in names)
    ]
    return bool(set(known) - set(fits)) if text.startswith("^") else bool(fits)


def is_loopback(address: str) -> bool:
    """Whether only this host itself reaches it."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
