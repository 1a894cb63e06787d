"""What travels between services, and how a process joins in. The one shared package."""
