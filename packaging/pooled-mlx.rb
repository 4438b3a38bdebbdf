# Formula for a tap. `python packaging/fill_formula.py ARCHIVE URL` fills in the address and checksum of a release.
class PooledMlx < Formula
  desc "One local model on Apple Silicon, served to coding agents, warm across turns"
  homepage "@HOMEPAGE@"
  url "@URL@"
  sha256 "@SHA256@"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@3.13"

  # The libraries in wheels have short names and no room in their headers for Homebrew's own paths: they keep their names.
  preserve_rpath

  def install
    system Formula["python@3.13"].opt_bin/"python3.13", "-m", "venv", libexec
    system libexec/"bin/python", "-m", "pip", "install", "--quiet", "#{buildpath}[menubar]"
    (bin/"pooled-mlx").write <<~SH
      #!/bin/sh
      exec "#{opt_libexec}/bin/pooled-mlx" "$@"
    SH
    chmod 0755, bin/"pooled-mlx"
  end

  service do
    run [opt_bin/"pooled-mlx", "serve", "--service"]
    keep_alive successful_exit: false
    process_type :interactive
    log_path var/"log/pooled-mlx.log"
    error_log_path var/"log/pooled-mlx.log"
  end

  def caveats
    <<~TEXT
      Start it now and at every login:   brew services start pooled-mlx
      In the menu bar, before macOS 26:  pooled-mlx menubar install
      In the menu bar, on macOS 26:      uv tool install --managed-python 'pooled-mlx[menubar]'
                                         and its pooled-mlx menubar install
      Settings for an agent:             pooled-mlx connect AGENT
      Use either brew services or `pooled-mlx service install`, not both.
    TEXT
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/pooled-mlx --version")
  end
end
