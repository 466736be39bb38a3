"""The limit of open files of this process."""

import resource

from baton.limits import MAX_DESCRIPTORS


def raise_descriptor_limit() -> int:
    """Raise the soft limit to the hard one, at most to MAX_DESCRIPTORS. Returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= target:
        return get_descriptor_limit()
    resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return target


def get_descriptor_limit() -> int:
    """Return the soft limit, or MAX_DESCRIPTORS if there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
