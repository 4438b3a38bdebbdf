"""The Mac around the server: menu bar, launchd service, supervision, power and memory pressure.

Everything here speaks HTTP to the server or watches its process; nothing imports the engine or the web framework. The
logic runs on any system: what only a Mac has (launchctl, caffeinate, sysctl, rumps) is handed in.
"""
