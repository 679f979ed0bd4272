"""The API server's client, of the operator and of the `finetune` command.

`resources`, `errors` and `answers` are pure: paths, the meaning of answers, pages and watch events. `client` sends
requests; it alone imports aiohttp and kubernetes at once, which the extra `[operator]` installs.
"""
