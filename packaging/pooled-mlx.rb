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

  # The wheels of MLX hold libraries whose headers have no room for Homebrew's own paths: relinking them, as is done to
  # everything that `install` leaves behind, would fail. What is installed afterwards is left as it is.
  def install
    libexec.install Dir["*"]
    (bin/"pooled-mlx").write <<~SH
      #!/bin/sh
      exec "#{opt_libexec}/venv/bin/pooled-mlx" "$@"
    SH
    chmod 0755, bin/"pooled-mlx"
  end

  def post_install
    venv = libexec/"venv"
    rm_r(venv) if venv.exist?
    system Formula["python@3.13"].opt_bin/"python3.13", "-m", "venv", venv
    system venv/"bin/python", "-m", "pip", "install", "--quiet", "#{libexec}[menubar]"
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
      In the menu bar:                   pooled-mlx menubar
      Settings for an agent:             pooled-mlx connect AGENT
      Use either brew services or `pooled-mlx service install`, not both.
    TEXT
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/pooled-mlx --version")
  end
end
