# ruff: noqa: F821
# `python()` writes this below a line with SOCKET, the path of the server's: it sends it the command, passes signals on,
# and ends as the program does. It imports only what is built in: anything else would take longer than all the rest.
import _signal  # pyright: ignore[reportMissingImports]
import _socket
import marshal
import posix
import sys

server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
server.connect(SOCKET)  # pyright: ignore[reportUndefinedVariable]
request = marshal.dumps((sys.argv[1:], posix.getcwd(), dict(posix.environ)))
descriptors = b"".join([n.to_bytes(4, sys.byteorder) for n in (0, 1, 2)])
server.sendmsg([len(request).to_bytes(8, "big")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptors)])
while request:
    request = request[server.send(request) :]
for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGUSR1, _signal.SIGUSR2):
    _signal.signal(number, lambda number, _: server.send(bytes([number])))
code = int.from_bytes(server.recv(4), "big", signed=True)
if code < 0:
    if -code != _signal.SIGKILL:
        _signal.signal(-code, _signal.SIG_DFL)
    posix.kill(posix.getpid(), -code)
posix._exit(code)
