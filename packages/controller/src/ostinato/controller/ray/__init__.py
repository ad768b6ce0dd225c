"""The Ray backend. Ray itself is imported when something here is used, after `init_ray` has set its environment."""

from ostinato.controller.pool import ResourcePool, ResourcePoolManager
from ostinato.controller.ray.env import init_ray, ray_session, shutdown_ray
from ostinato.controller.ray.group import RayBackend

__all__ = ["RayBackend", "ResourcePool", "ResourcePoolManager", "init_ray", "ray_session", "shutdown_ray"]
